#include "models/ggml/chat_template.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string_view>
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

// llama-common's parser recurses: brackets and blocks nested deeper than any real template's would end the
// program. Counts every opening one without its closing one, which only a hostile template has many of.
constexpr int kMaxNesting = 200;
constexpr size_t kMaxTemplateBytes = size_t{1} << 20;

int deepest_nesting(std::string_view source) {
  int depth = 0, blocks = 0, deepest = 0;
  for (size_t i = 0; i < source.size(); ++i) {
    const char c = source[i];
    if (c == '(' || c == '[' || c == '{') ++depth;
    if ((c == ')' || c == ']' || c == '}') && depth > 0) --depth;
    if (source.substr(i, 2) == "{%") {
      size_t word = source.find_first_not_of(" -+\n\t", i + 2);
      if (word == std::string_view::npos) word = source.size();
      const std::string_view rest = source.substr(word);
      if (rest.starts_with("if") || rest.starts_with("for") || rest.starts_with("macro") ||
          rest.starts_with("call") || rest.starts_with("filter"))
        ++blocks;
      if (rest.starts_with("end") && blocks > 0) --blocks;
    }
    deepest = std::max(deepest, depth + blocks);
  }
  return deepest;
}

class JinjaTemplate final : public ChatTemplate {
 public:
  JinjaTemplate(LlamaVocabModel model, std::string path)
      : model_(std::move(model)), path_(std::move(path)) {}

  std::string render(std::span<const ChatMessage> messages, const TemplateKwargs& kwargs,
                     PromptEnd end) const override {
    std::call_once(parsed_, [&] { parse(); });
    if (messages.empty()) throw std::invalid_argument("chat template: no messages");
    common_chat_templates_inputs inputs;
    for (const ChatMessage& message : messages) {
      common_chat_msg& out = inputs.messages.emplace_back();
      out.role = message.role;
      out.content = message.content;
    }
    inputs.add_generation_prompt = end == PromptEnd::kAnswer;
    inputs.use_jinja = true;
    inputs.chat_template_kwargs = kwargs;
    if (const auto thinking = kwargs.find("enable_thinking"); thinking != kwargs.end()) {
      if (thinking->second != "true" && thinking->second != "false")
        throw std::invalid_argument("chat template: enable_thinking is " + thinking->second +
                                    "; it must be true or false");
      inputs.enable_thinking = thinking->second == "true";
    }
    try {
      std::string prompt = common_chat_templates_apply(templates_.get(), inputs).prompt;
      return end == PromptEnd::kOpen ? open(std::move(prompt), messages.back().content) : prompt;
    } catch (const std::exception& error) {
      throw std::invalid_argument(std::string("chat template: ") + error.what());
    }
  }

 private:
  // Cuts what the template puts behind the last message's text.
  static std::string open(std::string prompt, std::string_view text) {
    while (!text.empty() && std::string_view(" \t\r\n").find(text.back()) != std::string_view::npos)
      text.remove_suffix(1);  // most templates do so too
    const size_t place = prompt.rfind(text);
    if (place == std::string::npos)
      throw std::invalid_argument("the last message's text is not in the prompt as it is");
    prompt.resize(place + text.size());
    return prompt;
  }

  void parse() const {
    const char* text = llama_model_chat_template(model_.get(), nullptr);
    const std::string_view source = text ? text : "";
    if (source.size() > kMaxTemplateBytes || deepest_nesting(source) > kMaxNesting) {
      throw ModelError(path_ + ": tokenizer.chat_template: " + std::to_string(source.size()) +
                       " bytes, nested " + std::to_string(deepest_nesting(source)) +
                       " deep; the limits are " + std::to_string(kMaxTemplateBytes) + " and " +
                       std::to_string(kMaxNesting));
    }
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
