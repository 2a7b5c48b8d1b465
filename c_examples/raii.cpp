// Uses the C header in C++: std::unique_ptr owns handles, and failures become exceptions.
//
// usage: raii MODEL.gguf

#include <llama_sidecar.h>

#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

namespace {

struct Free {
    void operator()(llama_model * model) const { llama_sidecar_model_free(model); }
    void operator()(llama_context * context) const { llama_sidecar_context_free(context); }
};

using Model   = std::unique_ptr<llama_model, Free>;
using Context = std::unique_ptr<llama_context, Free>;

void check(llama_sidecar_status status) {
    if (status != LLAMA_SIDECAR_STATUS_OK) {
        throw std::runtime_error(llama_sidecar_last_error());
    }
}

Model load(const std::string & path) {
    Model model(llama_model_load(path.c_str(), nullptr));
    if (!model) {
        throw std::runtime_error(llama_sidecar_last_error());
    }
    return model;
}

std::string metadata(const Model & model, const char * key) {
    uint64_t index  = 0;
    size_t   length = 0;
    check(llama_sidecar_metadata_find(model.get(), key, &index));
    check(llama_sidecar_metadata_text(model.get(), index, 0, nullptr, 0, &length));
    std::string text(length + 1, '\0');
    check(llama_sidecar_metadata_text(model.get(), index, 0, &text[0], text.size(), nullptr));
    text.resize(length);
    return text;
}

// An evaluation. No tensor changes during its lifetime.
class Evaluation {
  public:
    explicit Evaluation(const Context & context) : context_(context.get()) {
        check(llama_sidecar_eval_begin(context_, &generation_));
    }
    ~Evaluation() { llama_sidecar_eval_end(context_); }
    Evaluation(const Evaluation &)             = delete;
    Evaluation & operator=(const Evaluation &) = delete;
    uint64_t generation() const { return generation_; }

  private:
    llama_context * context_;
    uint64_t        generation_ = 0;
};

} // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        std::cerr << "usage: " << argv[0] << " MODEL.gguf\n";
        return 2;
    }
    try {
        const Model model = load(argv[1]);
        std::cout << "architecture " << metadata(model, "general.architecture") << ", library "
                  << llama_sidecar_version() << '\n';

        const Context    context(llama_sidecar_context_new(model.get()));
        const Evaluation evaluation(context);
        llama_sidecar_model_info info{};
        info.struct_size = sizeof(info);
        check(llama_sidecar_model_get_info(model.get(), &info));

        std::map<std::string, uint64_t> bytes_of_type;
        for (uint64_t i = 0; i < info.n_tensors; i++) {
            llama_sidecar_tensor_info tensor{};
            tensor.struct_size = sizeof(tensor);
            check(llama_sidecar_tensor_get_info(model.get(), i, &tensor));
            bytes_of_type[tensor.type_name] += tensor.nbytes;
        }
        for (const auto & [type, bytes] : bytes_of_type) {
            std::cout << type << ": " << bytes << " bytes\n";
        }
        if (evaluation.generation() != info.generation) {
            throw std::runtime_error("the model changed during an evaluation");
        }
        try {
            load("no_such_file.gguf");
            throw std::logic_error("a missing file was loaded");
        } catch (const std::runtime_error & expected) {
            std::cout << "expected error: " << expected.what() << '\n';
        }
        return 0;
    } catch (const std::exception & error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}
