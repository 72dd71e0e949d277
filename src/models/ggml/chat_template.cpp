#include "models/ggml/chat_template.h"

#include <exception>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "chat.h"
#include "log.h"
#include "models/model.h"

namespace pagedkv {
namespace {

// llama-common writes its remarks to stderr by itself; errors reach us as exceptions, so it is silenced.
constexpr int kSilent = -1;

// common_chat_templates_init throws a copy of the exception's base, without its text: ask again.
std::string why_not(const llama_model* model) {
  const char* source = llama_model_chat_template(model, nullptr);
  try {
    common_chat_template(source ? source : "", "", "");
  } catch (const std::exception& error) {
    return error.what();
  }
  return "not understood";
}

class JinjaTemplate final : public ChatTemplate {
 public:
  JinjaTemplate(LlamaVocabModel model, std::string path)
      : model_(std::move(model)), path_(std::move(path)) {}

  std::string render(std::span<const ChatMessage> messages) const override {
    std::call_once(parsed_, [&] { parse(); });
    if (messages.empty()) throw std::invalid_argument("chat template: no messages");
    common_chat_templates_inputs inputs;
    for (const ChatMessage& message : messages) {
      common_chat_msg& out = inputs.messages.emplace_back();
      out.role = message.role;
      out.content = message.content;
    }
    inputs.add_generation_prompt = true;
    inputs.use_jinja = true;
    try {
      return common_chat_templates_apply(templates_.get(), inputs).prompt;
    } catch (const std::exception& error) {
      throw std::invalid_argument(std::string("chat template: ") + error.what());
    }
  }

 private:
  void parse() const {
    common_log_set_verbosity_thold(kSilent);
    try {
      templates_ = common_chat_templates_init(model_.get(), "");
    } catch (const std::exception&) {
      throw ModelError(path_ + ": tokenizer.chat_template: " + why_not(model_.get()));
    }
  }

  LlamaVocabModel model_;
  std::string path_;
  mutable std::once_flag parsed_;
  mutable common_chat_templates_ptr templates_;
};

}  // namespace

std::unique_ptr<ChatTemplate> make_jinja_template(LlamaVocabModel model, std::string path) {
  return std::make_unique<JinjaTemplate>(std::move(model), std::move(path));
}

}  // namespace pagedkv
