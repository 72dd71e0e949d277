// Links every library of `llama_cpp` and runs a little of each: ggml, gguf, libllama, llama-common's templates.

#include <chat.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <gguf.h>
#include <llama.h>

#include <cstdio>

int main() {
  llama_backend_init();
  ggml_backend_t cpu = ggml_backend_cpu_init();
  gguf_context* file = gguf_init_empty();
  const bool template_parses = common_chat_verify_template("{{ messages[-1].content }}", true);
  const bool broken_template_parses = common_chat_verify_template("{{ messages[", true);
  std::printf("ggml %s, build %s\n%s\n", ggml_version(), PAGEDKV_LLAMA_BUILD_ID,
              llama_print_system_info());
  const bool ok = cpu != nullptr && file != nullptr && template_parses && !broken_template_parses;
  gguf_free(file);
  ggml_backend_free(cpu);
  llama_backend_free();
  return ok ? 0 : 1;
}
