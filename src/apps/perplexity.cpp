#include "apps/perplexity.h"

#include <cstdio>
#include <iostream>
#include <limits>
#include <list>
#include <nlohmann/json.hpp>

#include "apps/cli.h"
#include "apps/progress.h"
#include "engine/perplexity.h"
#include "engine/text_stream.h"
#include "pagedkv/base/log.h"
#include "pagedkv/kernels/kernel_set.h"

namespace pagedkv::apps {
namespace {

using nlohmann::ordered_json;

struct PerplexityCommand {
  ModelOptions model;
  std::string file;
  int64_t chunks = -1;
  std::string compare;  // page formats; empty: the one of the page options
  bool json = false;
};

// As llama.cpp's -f: a newline at the very end is not part of the text.
std::string read_text(const std::string& path) {
  if (path.empty()) throw std::invalid_argument("no text: give a file, or - for standard input");
  const std::string name = path == "-" ? "standard input" : "text " + path;
  std::string text = path == "-" ? read_all(std::cin, name) : read_file(path, name);
  if (!text.empty() && text.back() == '\n') text.pop_back();
  if (text.empty()) throw std::invalid_argument(name + ": is empty");
  return text;
}

ordered_json row_json(const KvSettings& settings, const PagePool& pool, const PerplexityResult& r,
                      bool compared) {
  ordered_json row{{"page_format", format_label(settings)},
                   {"type_k", page_format_name(settings.key_format)},
                   {"type_v", page_format_name(settings.value_format)},
                   {"bytes_per_token", pool.bytes_per_token()},
                   {"perplexity", r.perplexity},
                   {"perplexity_error", r.perplexity_error}};
  if (compared)
    row.update({{"kl_mean", r.kl_mean},
                {"kl_mean_error", r.kl_mean_error},
                {"kl_p99", r.kl_p99},
                {"kl_max", r.kl_max},
                {"same_top", r.same_top}});
  return row;
}

void print_table(const ordered_json& j, bool compared) {
  std::printf(
      "%s chunks of %s tokens, %s tokens scored%s\n\n", j["chunks"].dump().c_str(),
      j["context"].dump().c_str(), j["scored"].dump().c_str(),
      compared ? (", KL divergence from " + j["reference"].get<std::string>()).c_str() : "");
  std::printf("| pages | bytes/token | perplexity |%s\n| --- | --: | --: |%s\n",
              compared ? " KL mean | KL 99 % | KL max | same top |" : "",
              compared ? " --: | --: | --: | --: |" : "");
  for (const auto& row : j["formats"]) {
    const auto number = [&](const char* key) { return row[key].get<double>(); };
    std::printf("| %s | %s | %.4f ± %.4f |", row["page_format"].get<std::string>().c_str(),
                row["bytes_per_token"].dump().c_str(), number("perplexity"),
                number("perplexity_error"));
    if (compared)
      std::printf(" %.6f | %.6f | %.6f | %.2f %% |", number("kl_mean"), number("kl_p99"),
                  number("kl_max"), 100 * number("same_top"));
    std::printf("\n");
  }
}

int perplexity(PerplexityCommand o) {
  o.model.num_threads = o.model.threads();  // settled once: the default follows the machine's load
  if (o.chunks == 0 || o.chunks < -1)
    throw std::invalid_argument("--chunks " + std::to_string(o.chunks) +
                                ": must be at least 1, or -1 for all of the text");
  const std::string text = read_text(o.file);
  const bool compared = !o.compare.empty();
  std::vector<KvSettings> formats{o.model.kv_settings()};
  if (compared) formats = with_each_format(formats[0], o.compare);
  auto m = load_model(o.model, true);
  const auto& info = m.model->info();
  const auto tokens = m.tokenizer->tokenize(text, true, false);

  std::list<PagePool> pools;
  std::vector<PagePool*> pool_pointers;
  for (const KvSettings& s : formats)
    pool_pointers.push_back(&pools.emplace_back(pool_options(info, s)));
  log(LogLevel::kInfo, startup_line(info, formats[0], pools.front(), o.model.threads()));

  PerplexityOptions options;
  options.context = context_tokens(info, formats[0]);
  options.max_chunks = o.chunks;
  options.begin = m.tokenizer->begin_token();
  options.num_threads = o.model.threads();
  ProgressBar bar("perplexity", true);
  options.progress = [&](double done) { bar.show(done); };
  const auto report = measure_perplexity(*m.model, tokens, pool_pointers, options);
  bar.clear();

  ordered_json j{{"model", valid_utf8(o.model.path())},
                 {"file", valid_utf8(o.file)},
                 {"tokens", tokens.size()},
                 {"context", options.context},
                 {"chunks", report.chunks},
                 {"scored", report.scored},
                 {"exact", info.exact},
                 {"kernel_set", kernels().name},
                 {"threads", o.model.threads()}};
  if (compared) j["reference"] = format_label(formats[0]);
  auto& rows = j["formats"] = ordered_json::array();
  for (size_t i = 0; i < formats.size(); ++i)
    rows.push_back(row_json(formats[i], *pool_pointers[i], report.results[i], compared));
  if (o.json)
    std::printf("%s\n", j.dump().c_str());
  else
    print_table(j, compared);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw std::runtime_error("standard output: cannot be written");
  return kOk;
}

}  // namespace

void add_perplexity(CLI::App& app, std::function<int()>& command) {
  auto o = std::make_shared<PerplexityCommand>();
  o->model.context = 512;
  auto* sub = app.add_subcommand(
      "perplexity",
      "how well the model predicts a text, by page format (llama-perplexity's numbers)");
  sub->add_option("-f,--file,file", o->file,
                  "the text, with or without the flag; -: standard input. At least one chunk long")
      ->type_name("FILE");
  o->model.add_model(*sub);
  add_option(*sub, "-c,--ctx-size,--max-model-len", o->model.context,
             "tokens in a chunk; the second half of each is scored")
      ->check(CLI::Range(3, std::numeric_limits<int32_t>::max()));
  add_option(*sub, "--chunks", o->chunks, "most chunks to score (-1: all of the text)");
  add_option(*sub, "--compare", o->compare,
             "page formats, a list such as f16,q8,k=f16,v=q4, in place of --kv-cache-dtype: each "
             "one's perplexity, and its KL divergence from the first of the list")
      ->type_name("FORMATS")
      ->default_str("");
  o->model.add_pages(*sub);
  name_variable(sub->add_flag("--json", o->json, "one JSON object on stdout instead of the table"));
  sub->parse_complete_callback([o, &command] { command = [=] { return perplexity(*o); }; });
}

}  // namespace pagedkv::apps
