// A host without a reference to llama-sidecar: node-llama-cpp with its prebuilt library.
//
//   node host.mjs MODEL [GPU_LAYERS]
//
// Reads commands from standard input and answers each with a line:
//
//   text N   forgets everything, reads the prompt, writes N tokens -> their ids
//   more N   goes on from there with N more tokens                 -> their ids
//   read     the last text in letters                              -> quoted
//   free     frees the model and all that belongs to it            -> "freed"
//   load P   loads a model from another path                       -> "loaded"
//   end      ends
//
// GPU_LAYERS selects the Vulkan library; without it, that for the CPU is used. HOST_THREADS
// sets the number of threads, 1 by default: threads of ggml spin while they wait, so several
// are slow on busy cores.
import {createInterface} from "node:readline";
import {getLlama} from "node-llama-cpp";

const PROMPT = "The capital of France is";
const [modelPath, gpuLayers] = process.argv.slice(2);
const onGpu = gpuLayers != null;
const threads = Number(process.env.HOST_THREADS ?? 1);

const llama = await getLlama({build: "never", gpu: onGpu ? "vulkan" : false, logLevel: "error"});
let model, context, sequence;

async function load(path) {
    model = await llama.loadModel({modelPath: path, gpuLayers: onGpu ? Number(gpuLayers) : 0});
    context = await model.createContext({contextSize: 256, batchSize: 64, threads});
    sequence = context.getSequence();
}

let last = [];
let written = [];

async function write(tokens, count) {
    const ids = [];
    const options = {temperature: 0, yieldEogToken: true};
    for await (const token of sequence.evaluate(tokens, options)) {
        ids.push(token);
        if (ids.length === count) break;
    }
    last = [ids.at(-1)];
    written.push(...ids);
    return ids.join(" ");
}

const commands = {
    async text(count) {
        await sequence.clearHistory();
        written = [];
        return await write(model.tokenize(PROMPT, false, "trimLeadingSpace"), Number(count));
    },
    async more(count) {
        return await write(last, Number(count));
    },
    read() {
        return JSON.stringify(PROMPT + model.detokenize(written));
    },
    async free() {
        await context.dispose();
        await model.dispose();
        return "freed";
    },
    async load(path) {
        await load(path);
        return "loaded";
    }
};

await load(modelPath);
console.log("ready");
for await (const line of createInterface({input: process.stdin})) {
    const [command, argument] = line.split(" ");
    if (command === "end") break;
    console.log(await commands[command](argument));
}
process.exit(0);
