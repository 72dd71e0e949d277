#include "server/generation_body.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "server/random_bits.h"
#include "server/token_text.h"

namespace pagedkv {
namespace {

constexpr size_t kMostMessages = 4096, kMostPrompts = 1024, kMostStops = 4;
constexpr size_t kMostStopBytes = 1024, kMostStopTokens = 256, kMostHintBytes = 1024;
constexpr int kMostCompletionLogprobs = 5;
constexpr int64_t kDefaultCompletionTokens = 16;

// Fields that are known and have no effect here: they are for who bills or logs, or say what is so anyway.
constexpr const char* kIgnored[] = {"user",
                                    "metadata",
                                    "store",
                                    "service_tier",
                                    "verbosity",
                                    "safety_identifier",
                                    "parallel_tool_calls",
                                    "spaces_between_special_tokens",
                                    "skip_special_tokens",
                                    "request_id"};

// Fields that are known and that this server cannot do: null, false, "" and empty arrays and objects ask for nothing.
constexpr const char* kUnsupported[] = {"tools",
                                        "functions",
                                        "audio",
                                        "prediction",
                                        "web_search_options",
                                        "moderation",
                                        "prompt_cache_options",
                                        "grammar",
                                        "json_schema",
                                        "guided_json",
                                        "guided_regex",
                                        "guided_choice",
                                        "guided_grammar",
                                        "structured_outputs",
                                        "suffix",
                                        "use_beam_search",
                                        "include_stop_str_in_output",
                                        "truncate_prompt_tokens",
                                        "bad_words",
                                        "lora",
                                        "documents",
                                        "chat_template",
                                        "logits_processors",
                                        "prompt_embeds",
                                        "kv_transfer_params"};

bool is_neutral(const BodyJson& value) {
  return value.is_null() || value == false || (value.is_string() && value.empty()) ||
         (value.is_structured() && value.empty());
}

void refuse_unsupported(Fields& fields, bool chat) {
  for (const char* name : kIgnored) fields.any(name);
  for (const char* name : kUnsupported)
    if (const BodyJson* value = fields.any(name); value && !is_neutral(*value))
      fields.unsupported(name, "this server does not support it");
  if (const BodyJson* value = fields.any("skip_special_tokens"); value && *value == false)
    fields.unsupported("skip_special_tokens", "this server leaves special tokens out");
  for (const char* name : {"tool_choice", "function_call"})
    if (const BodyJson* value = fields.any(name); value && *value != "none")
      fields.unsupported(name, "this server does not support tools; it may be \"none\" only");
  if (const BodyJson* format = fields.object("response_format")) {
    Fields inner(*format, "response_format.");
    if (const auto type = inner.text("type"); type.value_or("text") != "text")
      fields.unsupported("response_format",
                         "this server does not support " + in_quotes(*type) + ", \"text\" only");
  }
  if (const BodyJson* modalities = fields.array("modalities"))
    for (const BodyJson& each : *modalities)
      if (each != "text") fields.unsupported("modalities", "this server answers with text only");
  if (fields.integer("best_of", 0, 128).value_or(1) > 1)
    fields.unsupported("best_of", "this server does not support it; use n");
  if (chat && fields.boolean("echo").value_or(false))
    fields.unsupported("echo", "it is for /v1/completions");
  if (const auto retention = fields.text("prompt_cache_retention", kMostHintBytes);
      retention && *retention != "in_memory" && *retention != "in-memory" && *retention != "24h")
    fields.refuse("prompt_cache_retention",
                  "is " + in_quotes(*retention) + ": must be in_memory or 24h");
}

std::vector<std::string> read_stops(Fields& fields) {
  std::vector<std::string> stops;
  const BodyJson* value = fields.any("stop");
  if (value == nullptr) return stops;
  if (value->is_string()) {
    stops.push_back(value->get<std::string>());
  } else {
    for (const BodyJson& each : *fields.array("stop")) {
      if (!each.is_string())
        fields.refuse("stop", "has " + described(each) + ": must be a string or an array of them");
      if (stops.size() == kMostStops)
        fields.refuse("stop", "has " + std::to_string(value->size()) + " entries; the limit is " +
                                  std::to_string(kMostStops));
      stops.push_back(each.get<std::string>());
    }
  }
  for (const std::string& stop : stops) {
    if (stop.empty()) fields.refuse("stop", "has an empty string; it could never be reached");
    if (stop.size() > kMostStopBytes)
      fields.refuse("stop", "has an entry of " + std::to_string(stop.size()) +
                                " bytes; the limit is " + std::to_string(kMostStopBytes));
  }
  return stops;
}

std::vector<std::pair<int32_t, float>> read_bias(Fields& fields, const Served& served) {
  std::vector<std::pair<int32_t, float>> out;
  const BodyJson* object = fields.object("logit_bias");
  if (object == nullptr) return out;
  for (const auto& [key, value] : object->items()) {
    int32_t token = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), token);
    if (error != std::errc() || end != key.data() + key.size() || token < 0 ||
        token >= served.info.vocab_size)
      fields.refuse("logit_bias", "has the token " + in_quotes(std::string_view(key)) +
                                      ": must be in 0.." +
                                      std::to_string(served.info.vocab_size - 1));
    const double bias = value.is_number() ? value.get<double>() : 1e9;
    if (!(bias >= -100 && bias <= 100))
      fields.refuse("logit_bias", "of token " + key + " is " + described(value) +
                                      ": must be a number in -100..100");
    out.emplace_back(token, static_cast<float>(bias));
  }
  return out;
}

SamplerOptions read_sampler(Fields& fields, const Served& served) {
  SamplerOptions s;
  const auto number = [&](const char* name, double least, double most, float absent) {
    return static_cast<float>(fields.number(name, least, most).value_or(absent));
  };
  s.temperature = number("temperature", 0, 2, 1);
  // 0 leaves the likeliest token, as any share below every probability does; the sampler wants one above 0.
  s.top_p = std::max(number("top_p", 0, 1, 1), 1e-30f);
  s.min_p = number("min_p", 0, 1, 0);
  s.top_k = static_cast<int32_t>(
      std::max<int64_t>(0, fields.integer("top_k", -1, INT32_MAX).value_or(0)));
  s.repetition_penalty = number("repetition_penalty", 0.01, 100, 1);
  s.presence_penalty = number("presence_penalty", -2, 2, 0);
  s.frequency_penalty = number("frequency_penalty", -2, 2, 0);
  s.logit_bias = read_bias(fields, served);
  if (const auto seed = fields.integer("seed")) {
    s.seed = static_cast<uint64_t>(*seed);
  } else {
    s.seed = random_bits();
  }
  return s;
}

// What both bodies have in common, but for the prompt.
GenerationRequest read_common(Fields& fields, const Served& served, const std::string& key_salt,
                              GenerationBody& out) {
  out.model = read_model(fields, served);
  refuse_unsupported(fields, out.chat);
  GenerationRequest r;
  r.sampler = read_sampler(fields, served);
  r.stop = read_stops(fields);
  r.min_new_tokens = fields.integer("min_tokens", 0, INT32_MAX).value_or(0);
  r.ignore_end = fields.boolean("ignore_eos").value_or(false);
  if (const BodyJson* tokens = fields.array("stop_token_ids")) {
    if (tokens->size() > kMostStopTokens)
      fields.refuse("stop_token_ids", "has " + std::to_string(tokens->size()) +
                                          " entries; the limit is " +
                                          std::to_string(kMostStopTokens));
    r.stop_tokens = read_tokens(*tokens, "stop_token_ids", served);
  }
  r.priority = static_cast<int32_t>(fields.integer("priority", INT32_MIN, INT32_MAX).value_or(0));
  r.cache_salt = read_salt(fields, key_salt);
  r.cache_prompt = fields.boolean("cache_prompt").value_or(true);
  for (const char* hint : {"session_id", "prompt_cache_key"}) fields.text(hint, kMostHintBytes);
  out.n = static_cast<int>(fields.integer("n", 1, served.max_n).value_or(1));
  out.stream = fields.boolean("stream").value_or(false);
  if (const BodyJson* options = fields.object("stream_options")) {
    if (!out.stream)
      fields.refuse("stream_options", "is for streams only: set stream too, or leave it out");
    Fields inner(*options, "stream_options.");
    out.include_usage = inner.boolean("include_usage").value_or(false);
    inner.boolean("include_obfuscation");
    inner.boolean("continuous_usage_stats");
    inner.log_unknown();
  }
  out.return_token_ids = fields.boolean("return_token_ids").value_or(false);
  return r;
}

std::string read_content(Fields& message, const std::string& where, const std::string& role) {
  const BodyJson* content = message.any("content");
  if (content == nullptr) {
    if (role != "assistant") message.missing("content");
    return "";
  }
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array())
    message.refuse("content",
                   "is " + described(*content) + ": must be a string or an array of parts");
  std::string out;
  for (size_t i = 0; i < content->size(); ++i) {
    Fields part((*content)[i], where + "content[" + std::to_string(i) + "].");
    const auto type = part.text("type");
    if (!type) part.missing("type");
    const char* text_name = *type == "refusal" ? "refusal" : "text";
    if (*type != "text" && *type != "input_text" && *type != "refusal")
      part.unsupported("type",
                       "parts of type " + in_quotes(*type) + " are not supported, only \"text\"");
    if (part.has("prompt_cache_breakpoint"))
      part.unsupported("prompt_cache_breakpoint", "this server does not support it");
    const auto text = part.text(text_name);
    if (!text) part.missing(text_name);
    out += (i > 0 ? "\n" : "") + *text;
  }
  return out;
}

ChatMessage read_message(const BodyJson& json, size_t index) {
  const std::string where = "messages[" + std::to_string(index) + "].";
  Fields message(json, where);
  const auto role = message.text("role");
  if (!role) message.missing("role");
  constexpr const char* kRoles[] = {"system", "developer", "user", "assistant", "tool"};
  if (std::ranges::find(kRoles, *role) == std::end(kRoles))
    message.refuse(
        "role", "is " + in_quotes(*role) + ": must be system, developer, user, assistant or tool");
  for (const char* name : {"tool_calls", "function_call", "audio"})
    if (const BodyJson* value = message.any(name); value && !is_neutral(*value))
      message.unsupported(name, "this server does not support it");
  for (const char* name : {"name", "refusal", "reasoning", "reasoning_content", "tool_call_id"})
    message.any(name);
  ChatMessage out{*role, read_content(message, where, *role)};
  message.log_unknown();
  return out;
}

// The prompts of a completion: a string, tokens, or an array of either.
std::vector<const BodyJson*> prompts_of(Fields& fields) {
  const BodyJson* prompt = fields.any("prompt");
  if (prompt == nullptr) fields.missing("prompt");
  if (prompt->is_string()) return {prompt};
  if (!prompt->is_array())
    fields.refuse("prompt",
                  "is " + described(*prompt) +
                      ": must be a string, an array of strings, of tokens, or of arrays of tokens");
  if (prompt->empty()) fields.refuse("prompt", "is an empty array");
  if (prompt->front().is_number()) return {prompt};
  if (prompt->size() > kMostPrompts)
    fields.refuse("prompt", "has " + std::to_string(prompt->size()) + " prompts; the limit is " +
                                std::to_string(kMostPrompts));
  std::vector<const BodyJson*> out;
  for (const BodyJson& each : *prompt) {
    if (!each.is_string() && !each.is_array())
      fields.refuse("prompt",
                    "has " + described(each) +
                        " among its prompts: each must be a string or an array of tokens");
    out.push_back(&each);
  }
  return out;
}

}  // namespace

std::string read_model(Fields& fields, const Served& served) {
  const std::string name = fields.text("model").value_or(served.names.front());
  check_model(served, name);
  return name;
}

std::vector<int32_t> read_tokens(const BodyJson& list, const std::string& param,
                                 const Served& served) {
  std::vector<int32_t> tokens;
  for (const BodyJson& value : list) {
    const int64_t token = whole_number(value).value_or(-1);
    if (token < 0 || token >= served.info.vocab_size)
      throw invalid_value(param, param + " has " + described(value) +
                                     ": a token is an integer in 0.." +
                                     std::to_string(served.info.vocab_size - 1));
    tokens.push_back(static_cast<int32_t>(token));
  }
  return tokens;
}

std::string read_salt(Fields& fields, const std::string& key_salt) {
  constexpr size_t kMostBytes = 128;
  const auto salt = fields.text("cache_salt", kMostBytes);
  if (!salt) return key_salt;
  if (salt->empty()) fields.refuse("cache_salt", "is empty; leave it out instead");
  if (salt->find_first_of(std::string_view("@/\\\0", 4)) != std::string::npos)
    fields.refuse("cache_salt", "is " + in_quotes(*salt) + ": must have none of @ / \\ NUL");
  return key_salt.empty() ? *salt : key_salt + "/" + *salt;
}

ChatPrompt read_messages(Fields& fields, Served& served) {
  const BodyJson* messages = fields.array("messages");
  if (messages == nullptr) fields.missing("messages");
  if (messages->empty()) fields.refuse("messages", "is empty; at least one is needed");
  if (messages->size() > kMostMessages)
    fields.refuse("messages", "has " + std::to_string(messages->size()) +
                                  " messages; the limit is " + std::to_string(kMostMessages));
  std::vector<ChatMessage> list;
  for (size_t i = 0; i < messages->size(); ++i) list.push_back(read_message((*messages)[i], i));
  TemplateKwargs kwargs;
  if (const BodyJson* object = fields.object("chat_template_kwargs"))
    for (const auto& [name, value] : object->items()) kwargs[name] = value.dump();
  if (const auto effort = fields.text("reasoning_effort", 64))
    kwargs.try_emplace("reasoning_effort", BodyJson(*effort).dump());
  const bool open = fields.boolean("continue_final_message").value_or(false);
  const bool answer = fields.boolean("add_generation_prompt").value_or(!open);
  if (open && answer)
    fields.refuse("continue_final_message", "and add_generation_prompt exclude each other");
  if (open && list.back().role != "assistant")
    fields.refuse("continue_final_message", "needs a last message of the assistant");
  const auto end = open ? PromptEnd::kOpen : answer ? PromptEnd::kAnswer : PromptEnd::kMessages;
  return served.text.run([&] {
    ChatPrompt prompt;
    try {
      prompt.text = served.chat_template.render(list, kwargs, end);
    } catch (const std::invalid_argument& e) {
      throw invalid_value("messages", e.what());
    }
    prompt.tokens = served.tokenizer.tokenize(prompt.text, true, true);
    return prompt;
  });
}

GenerationBody read_chat_body(const BodyJson& body, Served& served, const std::string& salt) {
  Fields fields(body);
  GenerationBody out;
  GenerationRequest r = read_common(fields, served, salt, out);
  r.max_new_tokens = fields.integer("max_tokens", 0, INT32_MAX).value_or(-1);
  if (const auto most = fields.integer("max_completion_tokens", 0, INT32_MAX))
    r.max_new_tokens = *most;
  r.logprobs = out.logprobs = fields.boolean("logprobs").value_or(false);
  r.top_logprobs =
      static_cast<int>(fields.integer("top_logprobs", 0, kMostTopLogprobs).value_or(0));
  if (r.top_logprobs > 0 && !out.logprobs) fields.refuse("top_logprobs", "needs logprobs: true");
  ChatPrompt prompt = read_messages(fields, served);
  fields.log_unknown();
  r.prompt = std::move(prompt.tokens);
  out.requests.push_back(std::move(r));
  return out;
}

GenerationBody read_completion_body(const BodyJson& body, Served& served, const std::string& salt) {
  Fields fields(body);
  GenerationBody out;
  out.chat = false;
  GenerationRequest r = read_common(fields, served, salt, out);
  r.max_new_tokens = fields.integer("max_tokens", 0, INT32_MAX).value_or(kDefaultCompletionTokens);
  const auto top = fields.integer("logprobs", 0, kMostCompletionLogprobs);
  r.logprobs = out.logprobs = top.has_value();
  r.top_logprobs = static_cast<int>(top.value_or(0));
  if (const BodyJson* other = fields.any("top_logprobs"); other && *other != 0)
    fields.unsupported("top_logprobs", "it is for chats; here logprobs says how many");
  out.echo = fields.boolean("echo").value_or(false);
  r.prompt_logprobs = out.echo && out.logprobs;
  const bool special = fields.boolean("add_special_tokens").value_or(true);
  const auto prompts = prompts_of(fields);
  fields.log_unknown();
  for (const BodyJson* prompt : prompts) {
    GenerationRequest& each = out.requests.emplace_back(r);
    if (prompt->is_string()) {
      const auto& text = prompt->get_ref<const std::string&>();
      each.prompt = served.text.run([&] { return served.tokenizer.tokenize(text, special, true); });
      if (out.echo) out.prompt_texts.push_back(text);
    } else {
      each.prompt = read_tokens(*prompt, "prompt", served);
      if (out.echo) out.prompt_texts.push_back(text_of(served.tokenizer, each.prompt));
    }
  }
  return out;
}

}  // namespace pagedkv
