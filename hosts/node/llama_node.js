// A host without a reference to llama-sidecar: llama.node, one prebuilt object with llama.cpp, whose calls of ggml the
// compiler has bound (npm: @fugood/node-llama-linux-x64).
//
//   sh -c 'exec node llama_node.js ADDON MODEL 3>&1 1>&2'
//
// Reads commands from standard input and answers each with a line on descriptor 3: the addon logs to standard output.
//
//   text N   N tokens after a prompt   -> the text, and the likeliest tokens with their probabilities; JSON
//   free     frees the model           -> "freed"
//   load P   loads a model             -> "loaded"
//   end      ends
const {writeSync} = require("node:fs");
const {createInterface} = require("node:readline");

const [addon, modelPath] = process.argv.slice(2);
const {LlamaContext} = require(addon);
const answer = text => writeSync(3, `${text}\n`);
let context;

const commands = {
    async text(count) {
        const options = {
            prompt: "The capital of France is", n_predict: Number(count), temperature: 1, seed: 1, n_probs: 5
        };
        await context.clearCache();
        const {text, completion_probabilities: probabilities} = await context.completion(options, () => {});
        // The addon returns those of earlier texts, too.
        return JSON.stringify([text, probabilities.slice(-count)]);
    },
    async free() {
        await context.release();
        return "freed";
    },
    async load(path) {
        const options = {model: path, n_ctx: 256, n_threads: 1, n_gpu_layers: 0, use_mmap: true, no_extra_bufts: true};
        context = new LlamaContext(options, () => {}, () => {});
        return "loaded";
    }
};

(async () => {
    await commands.load(modelPath);
    answer("ready");
    for await (const line of createInterface({input: process.stdin})) {
        const [command, argument] = line.split(" ");
        if (command === "end") break;
        answer(await commands[command](argument));
    }
    await context.release();
    process.exit(0);
})();
