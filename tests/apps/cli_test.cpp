// The program as a user calls it: what goes where, and with which exit code.
#include "apps/cli_testing.h"

#include <nlohmann/json.hpp>

namespace pagedkv {
namespace {

using testing::Cli;
using testing::slurp;

TEST_F(Cli, TheAnswerAloneGoesToStdout) {
  const auto r = run("run -m toy: -n 20 hello");
  EXPECT_EQ(r.code, 0);
  EXPECT_EQ(r.out.size(), 21u) << r.out;  // 20 letters and a newline
  EXPECT_NE(r.err.find("toy"), std::string::npos);
  EXPECT_EQ(run("generate -m toy: -n 20 hello").out, r.out);
}

TEST_F(Cli, ThePromptComesFromArgumentFileOrStdin) {
  const auto want = run("run -m toy: -n 20 'hello world'").out;
  const auto prompt = file("prompt", "hello world\n");
  EXPECT_EQ(run("run -m toy: -n 20 hello world").out, want);
  EXPECT_EQ(run("run -m toy: -n 20", "", prompt).out, want);
  EXPECT_EQ(run("run -m toy: -n 20 --file " + file("exact", "hello world")).out, want);
  EXPECT_EQ(run("run -m toy: -n 20 -p 'hello world'").out, want);
  EXPECT_EQ(run("run -m toy: -n 20 -", "", prompt).out, want);
  EXPECT_EQ(run("run -m toy: -n 20").code, 2);
  EXPECT_EQ(run("run -m toy: -n 20 --file /nonexistent").code, 2);
  EXPECT_EQ(run("run -m toy: -n 20 hello --file " + prompt).code, 2);
}

TEST_F(Cli, HelpAndVersionGoToStdout) {
  for (const char* args :
       {"--help", "--version", "run --help", "bench --help", "perplexity --help"}) {
    const auto r = run(args);
    EXPECT_EQ(r.code, 0) << args;
    EXPECT_FALSE(r.out.empty()) << args;
    EXPECT_TRUE(r.err.empty()) << args << r.err;
  }
}

TEST_F(Cli, UsageErrorsAreTwoAndNameTheValue) {
  const struct {
    const char* args;
    const char* names;
  } cases[] = {
      {"", "subcommand"},
      {"fly", "fly"},
      {"run -m toy: x --frobnicate", "frobnicate"},
      {"run -m toy: x -c 0", "-c 0"},
      {"run -m toy: x -c 1000000", "1000000"},
      {"run -m toy: x --kv-cache-dtype q5", "q5"},
      {"run -m toy: x --block-size 257", "257"},
      {"run -m toy: x --block-size 0", "0"},
      {"run -m toy: x --num-blocks 0", "num-blocks"},
      {"run -m toy: x --kv-cache-memory-bytes lots", "lots"},
      {"run -m toy: x --kv-cache-memory-bytes 0", "positive"},
      {"run -m toy: x --exact maybe", "maybe"},
      {"run -m toy: x -t -1", "threads"},
      {"run -m toy: x --temperature -1", "temperature"},
      {"run -m toy: x --top-p 1.5", "top-p"},
      {"run -m toy: x --temperature nan", "temperature"},
      {"run -m toy: x -n -2", "predict"},
      {"run -m toy: x --top-k -2", "top-k"},
      {"run -m toy: x --seed -2", "seed"},
      {"bench -m toy: -fa 0", "flash-attn"},
      {"run -m toy: x --stop ''", "stop"},
      {"bench -m toy: -p 0 -n 0", "nothing"},
      {"bench -m toy: -o xml", "xml"},
      {"bench -m toy: --prefix --prefix-requests 0", "prefix-requests"},
      {"bench -m toy: --prefix --attention", "--prefix"},
      {"perplexity -m toy:", "no text"},
      {"perplexity -m toy: /nonexistent", "/nonexistent"},
      {"perplexity -m toy: /dev/null", "/dev/null: is empty"},
      {"perplexity -m toy: /", "cannot be read"},
      {"perplexity -m toy: - -c 2", "ctx-size"},
      {"perplexity -m toy: - --chunks 0", "--chunks 0"},
      {"perplexity -m toy: - --chunks -2", "--chunks -2"},
      {"perplexity -m toy: -", "standard input: is empty"},
  };
  for (const auto& c : cases) {
    const auto r = run(c.args);
    EXPECT_EQ(r.code, 2) << c.args << r.err;
    EXPECT_NE(r.err.find(c.names), std::string::npos) << c.args << ": " << r.err;
    EXPECT_TRUE(r.out.empty()) << c.args << r.out;
  }
}

TEST_F(Cli, VariablesStandForFlagsAndFlagsWin) {
  const auto want = run("run -m toy: -n 7 x").out;
  EXPECT_EQ(run("run x", "PAGEDKV_MODEL=toy: PAGEDKV_PREDICT=7").out, want);
  EXPECT_EQ(run("run -n 7 x", "PAGEDKV_MODEL=toy: PAGEDKV_PREDICT=9").out, want);
  EXPECT_EQ(run("run -m toy: x", "PAGEDKV_KV_CACHE_DTYPE=q5").code, 2);
  const auto q8 = run("run -m toy: -n 7 x", "PAGEDKV_KV_CACHE_DTYPE=q8");
  EXPECT_NE(q8.err.find("pages q8"), std::string::npos) << q8.err;
}

TEST_F(Cli, AVariableReachesItsOwnSubcommandAlone) {
  EXPECT_EQ(run("run -m toy: -n 3 x", "PAGEDKV_N_PROMPT=junk").code, 0);
  EXPECT_EQ(run("bench -m toy: -p 4 -n 0 -r 1 -t 1", "PAGEDKV_N_PROMPT=junk").code, 0);
  EXPECT_EQ(run("bench -m toy: -n 0 -r 1 -t 1", "PAGEDKV_N_PROMPT=junk").code, 2);
  const auto flag = run("run -m toy: -n 3 x --kv-cache-dtype f32", "PAGEDKV_CACHE_TYPE_K=q8");
  EXPECT_NE(flag.err.find("pages f32"), std::string::npos) << flag.err;
}

TEST_F(Cli, OfAFlagGivenTwiceTheLastCounts) {
  EXPECT_EQ(run("run -m toy: -n 3 -n 7 x").out, run("run -m toy: -n 7 x").out);
}

TEST_F(Cli, AnEndlessPromptIsRefused) {
  const auto r = run("run -m toy: -n 3 --file /dev/zero");
  EXPECT_EQ(r.code, 2);
  EXPECT_NE(r.err.find("64.0 MiB"), std::string::npos) << r.err;
  EXPECT_EQ(run("run -m toy: -n 3 --file " + dir.string()).code, 2);
}

TEST_F(Cli, AnInterruptedPromptReportsWhatWasComputed) {
  const auto prompt = file("prompt", std::string(3000, 'x'));
  const std::string out = (dir / "json").string();
  // A loaded machine may not have begun after a second: then the signal ends it, without output.
  for (int seconds = 1; slurp(out).empty() && seconds <= 16; seconds *= 2) {
    const std::string command =
        "timeout -s INT " + std::to_string(seconds) + " '" + std::string(PAGEDKV_BINARY) +
        "' run -m " + quoted_model("SmolLM2-135M-Instruct.Q4_1.gguf") +
        " -t 1 --raw --prefill-chunk 16 --json --file " + prompt + " >" + out + " 2>/dev/null";
    ASSERT_NE(std::system(command.c_str()), -1);
  }
  const auto j = nlohmann::json::parse(slurp(out));
  EXPECT_EQ(j["finish_reason"], "cancelled");
  EXPECT_GE(j["timings"]["prompt_ms"].get<double>(), 0);
  EXPECT_LE(j["stats"]["block_utilization"].get<double>(), 1);
  EXPECT_LE(j["stats"]["bytes_in_use"].get<int64_t>(),
            j["stats"]["bytes_committed"].get<int64_t>());
}

TEST_F(Cli, SpellingsOfThePageFormat) {
  EXPECT_NE(run("run -m toy: -n 1 x -ctk q8_0 -ctv f32").err.find("k=q8,v=f32"), std::string::npos);
  EXPECT_NE(run("run -m toy: -n 1 x --paged-kv-quantization off").err.find("pages f16"),
            std::string::npos);
  EXPECT_NE(run("run -m toy: -n 1 x --kv-quant int8").err.find("pages q8"), std::string::npos);
}

TEST_F(Cli, TheSeedsVariablesSetWhatFlagsLeaveOut) {
  const std::string call = "run -m toy: -n 4 hello --json ";
  const auto stats = [&](const std::string& args, const std::string& before) {
    return nlohmann::json::parse(run(call + args, before).out).at("stats");
  };
  const std::string both = "MTPLX_PAGED_KV_QUANT=q4 MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE=8";
  auto s = stats("", both);
  EXPECT_EQ(s["page_format"], "q4");
  EXPECT_EQ(s["page_size"], 8);
  EXPECT_EQ(stats("--block-size 32", both)["page_size"], 32);
  EXPECT_EQ(stats("--kv-quant q8", both)["page_format"], "q8");
  EXPECT_EQ(stats("-ctk q8", both)["page_format"], "k=q8,v=q4");
  EXPECT_EQ(stats("", both + " PAGEDKV_KV_CACHE_DTYPE=bf16")["page_format"], "bf16");
  EXPECT_EQ(stats("", "MTPLX_VLLM_METAL_PAGED_KV_QUANT=8bit " + both)["page_format"], "q8");

  const std::string few =
      "MTPLX_VLLM_METAL_PAGED_NUM_BLOCKS=1 MTPLX_VLLM_METAL_PAGED_BLOCK_SIZE=4 ";
  EXPECT_EQ(run(call, few + "MTPLX_DYNAMIC_PAGED_KV=0").code, 6);
  EXPECT_EQ(run(call + "--dynamic", few + "MTPLX_DYNAMIC_PAGED_KV=0").code, 0);
  EXPECT_EQ(run(call, few + "MTPLX_DYNAMIC_PAGED_KV=1").code, 0);
  EXPECT_EQ(run(call, "MTPLX_CONTEXT_WINDOW_TOKENS=4").code, 6);
  EXPECT_EQ(run(call, "MTPLX_CONTEXT_WINDOW_TOKENS=100000000").code, 0);
  EXPECT_EQ(stats("", both + " PAGEDKV_CACHE_TYPE_K=q8")["page_format"], "k=q8,v=q4");
  EXPECT_EQ(stats("--kv-quant k=q6,v=bf16", both)["page_format"], "k=q6,v=bf16");
  EXPECT_EQ(stats("", both + " PAGEDKV_BLOCK_SIZE=' '")["page_size"], 8);  // blank: unset
  EXPECT_EQ(run(call, "PAGEDKV_SLIDING_WINDOW=-1").code, 0);
  const auto ours = run(call, "PAGEDKV_BLOCK_SIZE=abc");
  EXPECT_EQ(ours.code, 2);
  EXPECT_NE(ours.err.find("PAGEDKV_BLOCK_SIZE=abc"), std::string::npos) << ours.err;
  const auto bad = run(call, "MTPLX_PAGED_KV_QUANT=q5");
  EXPECT_EQ(bad.code, 2);
  EXPECT_NE(bad.err.find("MTPLX_PAGED_KV_QUANT=q5"), std::string::npos) << bad.err;
}

TEST_F(Cli, JsonIsOneObjectWithTextTokensUsageTimingsAndStats) {
  const auto plain = run("run -m toy: -n 20 hello");
  const auto r = run("run -m toy: -n 20 --json hello");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto j = nlohmann::json::parse(r.out);
  EXPECT_EQ(j["text"].get<std::string>() + "\n", plain.out);
  EXPECT_EQ(j["finish_reason"], "length");
  EXPECT_EQ(j["tokens"].size(), 20u);
  EXPECT_EQ(j["prompt_tokens"].size(), 5u);
  EXPECT_TRUE(j["prompt_tokens"][0]["logprob"].is_null());
  EXPECT_LT(j["prompt_tokens"][1]["logprob"].get<double>(), 0);
  EXPECT_LT(j["tokens"][0]["logprob"].get<double>(), 0);
  EXPECT_EQ(j["usage"]["prompt_tokens"], 5);
  EXPECT_EQ(j["usage"]["completion_tokens"], 20);
  EXPECT_EQ(j["usage"]["total_tokens"], 25);
  EXPECT_EQ(j["stats"]["pages_peak"], 2);  // 5 + 19 stored tokens
  EXPECT_EQ(j["stats"]["bytes_moved"], 0);
  EXPECT_GT(j["timings"]["first_token_ms"].get<double>(), 0);
}

TEST_F(Cli, StatsNameThePagesTheRunNeeded) {
  const auto r = run("run -m toy: -n 60 --stats --num-blocks 1 hello");
  EXPECT_EQ(r.code, 0);
  EXPECT_NE(r.err.find("needed --num-blocks 4"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("growth events"), std::string::npos) << r.err;
}

TEST_F(Cli, WhatDoesNotFitIsSix) {
  const auto grown = run("run -m toy: -n 60 --num-blocks 1 --no-dynamic hello");
  EXPECT_EQ(grown.code, 6);
  EXPECT_NE(grown.err.find("16"), std::string::npos) << grown.err;
  const auto longer = run("run -m toy: -c 4 hello");
  EXPECT_EQ(longer.code, 6);
  EXPECT_NE(longer.err.find("5 tokens"), std::string::npos) << longer.err;
  EXPECT_EQ(run("run -m toy: --kv-cache-memory-bytes 100 --no-dynamic hello").code, 6);
}

TEST_F(Cli, KernelSetsAreChosenByName) {
  const auto want = run("run -m toy: -n 20 hello");
  const auto r = run("run -m toy: -n 20 hello", "PAGEDKV_KERNELS=reference");
  EXPECT_EQ(r.out, want.out);
  EXPECT_NE(r.err.find("kernels reference"), std::string::npos) << r.err;
  const auto unknown = run("run -m toy: -n 20 hello", "PAGEDKV_KERNELS=sse9");
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("sse9"), std::string::npos) << unknown.err;
}

#ifdef PAGEDKV_TEST_HOOKS
TEST_F(Cli, WithoutAFastSetTheReferenceRunsAndSaysSoOnce) {
  const auto r = run("run -m toy: -n 20 hello", "PAGEDKV_KERNELS_HIDE=avx512,avx2");
  EXPECT_EQ(r.code, 0);
  const auto first = r.err.find("warning:");
  ASSERT_NE(first, std::string::npos) << r.err;
  EXPECT_EQ(r.err.find("warning:", first + 1), std::string::npos) << r.err;
  EXPECT_EQ(r.out, run("run -m toy: -n 20 hello").out);
}
#endif

TEST_F(Cli, ModelErrorsAreFour) {
  EXPECT_EQ(run("run -m /nonexistent.gguf x").code, 4);
  EXPECT_EQ(run("run -m " + dir.string() + " x").code, 4);
  EXPECT_EQ(run("run -m " + file("empty.gguf", "") + " x").code, 4);
  EXPECT_EQ(run("run -m " + file("noise.gguf", std::string(5000, '\x7f')) + " x").code, 4);
  const std::string whole = slurp(models() + "/chain.gguf");
  ASSERT_FALSE(whole.empty());
  for (size_t cut : {3ul, 8ul, 100ul, 5000ul, whole.size() / 2, whole.size() - 1}) {
    const auto r = run("run -m " + file("cut.gguf", whole.substr(0, cut)) + " x");
    EXPECT_EQ(r.code, 4) << cut << r.err;
    EXPECT_NE(r.err.find("cut.gguf"), std::string::npos) << r.err;
  }
  const auto missing = run("run x", "PAGEDKV_CACHE_DIR=" + dir.string());
  EXPECT_EQ(missing.code, 4);
  EXPECT_NE(missing.err.find("-m"), std::string::npos) << missing.err;
}

TEST_F(Cli, AGpuIsRefusedWithTheReason) {
  const auto r = run("run -m toy: -ngl 1 x");
  EXPECT_EQ(r.code, 5);
  EXPECT_NE(r.err.find("CPU"), std::string::npos) << r.err;
}

TEST_F(Cli, AReadOnlyCacheFolderDoesNotMatterToARun) {
  EXPECT_EQ(run("run -m toy: -n 3 x", "PAGEDKV_CACHE_DIR=/proc").code, 0);
}

TEST_F(Cli, AFullDeviceIsReported) {
  for (const char* args : {"bench -m toy: -p 4 -n 0 -r 1 -t 1", "--help"}) {
    const std::string full =
        std::string("'") + PAGEDKV_BINARY + "' " + args + " >/dev/full 2>/dev/null";
    const int code = std::system(full.c_str());
    EXPECT_EQ(WEXITSTATUS(code), 1) << args;
  }
  const std::string command = std::string("'") + PAGEDKV_BINARY +
                              "' run -m toy: -n 20 hello >/dev/full 2>" + dir.string() + "/err";
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_NE(slurp(dir / "err").find("standard output"), std::string::npos);
}

// The CHAIN model knows its text exactly.
TEST_F(Cli, ARealModelFileWritesItsText) {
  const std::string chain = "run -m " + quoted_model("chain.gguf") + " ";
  EXPECT_EQ(run(chain + "-n 26 ABC").out, "DEFGHIJKLMNOPQRSTUVWXYZABC\n");
  EXPECT_EQ(run(chain + "-n 26 --stop GHI ABC").out, "DEF\n");
  EXPECT_EQ(run(chain + "-n 26 --stop GHX ABC").out, "DEFGHIJKLMNOPQRSTUVWXYZABC\n");
  EXPECT_EQ(run(chain + "-n 26 x").out, "yz.\n");
  EXPECT_EQ(run(chain + "-n 8 '\xf0\x9f\xa6\x99'").out, "\xf0\x9f\xa6\x99\xf0\x9f\xa6\x99\n");
  EXPECT_EQ(run(chain + "-n 10 '\xf0\x9f\xa6\x99'").out,
            "\xf0\x9f\xa6\x99\xf0\x9f\xa6\x99\xef\xbf\xbd\n");
  const auto j = nlohmann::json::parse(run(chain + "-n 3 --json x").out);
  EXPECT_EQ(j["finish_reason"], "length");
  EXPECT_NEAR(j["tokens"][0]["logprob"].get<double>(), -1.25e-5, 1e-5);
  const auto end = nlohmann::json::parse(run(chain + "-n 30 --json x").out);
  EXPECT_EQ(end["finish_reason"], "stop");
}

TEST_F(Cli, BenchHasTheFieldsOfLlamaBench) {
  const auto r = run("bench -m toy: -p 32 -n 4 -d 0,64 -r 2 -t 1 -o json");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto rows = nlohmann::json::parse(r.out);
  ASSERT_EQ(rows.size(), 4u);
  for (const auto& row : rows) {
    for (const char* key : {"model_filename", "model_size", "model_n_params", "n_threads", "type_k",
                            "type_v", "n_prompt", "n_gen", "n_depth", "avg_ns", "stddev_ns",
                            "avg_ts", "stddev_ts", "samples_ns", "samples_ts"})
      EXPECT_TRUE(row.contains(key)) << key;
    EXPECT_EQ(row["samples_ns"].size(), 2u);
    EXPECT_GT(row["avg_ts"].get<double>(), 0);
  }
  EXPECT_EQ(rows[3]["n_depth"], 64);
}

TEST_F(Cli, BenchShowsWhatASharedBeginningSaves) {
  const auto r =
      run("bench --prefix -m toy: --prefix-tokens 200 --own-tokens 10 --prefix-requests 4 "
          "--answer-tokens 4 -r 2 -t 1 -o json");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto row = nlohmann::json::parse(r.out).at(0);
  EXPECT_EQ(row["alone"]["prompt_tokens_computed"], 4 * 210);
  EXPECT_EQ(row["shared"]["prompt_tokens_computed"], 210 + 3 * 10);
  EXPECT_LT(row["shared"]["pages_peak"], row["alone"]["pages_peak"]);
  EXPECT_GT(row["bytes_saved"].get<int64_t>(), 0);
  EXPECT_EQ(row["shared"]["samples_prompt_ms"].size(), 2u);
  EXPECT_EQ(run("bench --prefix -m toy: --prefix-tokens 5000 -r 1 -t 1").code, 6);
  EXPECT_EQ(run("bench --prefix -m toy: --prefix-requests 2 -r 1 -t 1").code, 0);
}

TEST_F(Cli, SeveralAnswersShareThePromptAndDrawWithSeedsOfTheirOwn) {
  const std::string prompt(100, 'h');
  const std::string call = "run -m toy: -n 20 --temperature 1.5 ";
  const auto r = run(call + "--seed 5 --n 3 --json " + prompt);
  ASSERT_EQ(r.code, 0) << r.err;
  const auto j = nlohmann::json::parse(r.out);
  ASSERT_EQ(j["choices"].size(), 3u);
  EXPECT_FALSE(j.contains("text"));
  EXPECT_EQ(j["prompt_tokens"].size(), 100u);
  EXPECT_EQ(j["usage"]["completion_tokens"], 60);
  EXPECT_LE(j["stats"]["pages_peak"], 6 + 3 * 2);  // 21 in pages of their own
  std::string all;
  for (int i = 0; i < 3; ++i) {
    const auto alone = run(call + "--json --seed " + std::to_string(5 + i) + " " + prompt);
    const auto choice = j["choices"][i];
    EXPECT_EQ(choice["index"], i);
    EXPECT_EQ(choice["text"], nlohmann::json::parse(alone.out)["text"]) << i;
    EXPECT_EQ(choice["tokens"], nlohmann::json::parse(alone.out)["tokens"]) << i;
    if (i > 0) all.append("\n");
    all.append("answer ").append(std::to_string(i + 1)).append(" of 3:\n");
    all.append(choice["text"].get<std::string>()).append("\n");
  }
  EXPECT_EQ(run(call + "--seed 5 --n 3 " + prompt).out, all);
  EXPECT_EQ(run(call + "--n 0 " + prompt).code, 2);
  const auto go_on = run(call + "--n 2 --continue " + prompt);
  EXPECT_EQ(go_on.code, 2);
  EXPECT_NE(go_on.err.find("--num-answers 2"), std::string::npos) << go_on.err;
}

TEST_F(Cli, PerplexityIsOneTableOrOneJsonObject) {
  const auto text = file("text", std::string(300, 'a') + "\n");
  const std::string call = "perplexity -m toy: -t 1 -c 40 " + text;
  const auto r = run(call + " --json --kv-cache-dtype k=q8,v=f32 --chunks 5");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto j = nlohmann::json::parse(r.out);
  EXPECT_EQ(j["model"], "toy:");
  EXPECT_EQ(j["file"], text);
  EXPECT_EQ(j["tokens"], 300);  // the newline at the end is none
  EXPECT_EQ(j["context"], 40);
  EXPECT_EQ(j["chunks"], 5);
  EXPECT_EQ(j["scored"], 5 * 19);
  EXPECT_FALSE(j.contains("reference"));
  ASSERT_EQ(j["formats"].size(), 1u);
  const auto& row = j["formats"][0];
  EXPECT_EQ(row["page_format"], "k=q8,v=f32");
  EXPECT_EQ(row["bytes_per_token"], 16 + 4 + 16 * 4);
  EXPECT_GT(row["perplexity"].get<double>(), 1);
  EXPECT_GT(row["perplexity_error"].get<double>(), 0);
  EXPECT_FALSE(row.contains("kl_mean"));

  const auto table = run(call);
  EXPECT_EQ(table.code, 0);
  EXPECT_EQ(table.out.find("7 chunks of 40 tokens, 133 tokens scored\n"), 0u) << table.out;
  EXPECT_NE(table.out.find("| f16 | 64 | "), std::string::npos) << table.out;
  EXPECT_EQ(table.out.find("KL"), std::string::npos) << table.out;
  EXPECT_EQ(run("perplexity -m toy: -t 1 -c 40 -", "", text).out, table.out);
  EXPECT_EQ(run("perplexity -m toy: -t 1 -c 40 -f " + text).out, table.out);
}

// The CHAIN model is nearly sure of each next letter.
TEST_F(Cli, PerplexityOfATextTheModelKnows) {
  std::string alphabet;
  for (int i = 0; i < 200; ++i) alphabet += static_cast<char>('A' + i % 26);
  const auto r = run("perplexity -m " + quoted_model("chain.gguf") + " -t 1 -c 50 --json " +
                     file("text", alphabet));
  ASSERT_EQ(r.code, 0) << r.err;
  const auto j = nlohmann::json::parse(r.out);
  EXPECT_EQ(j["chunks"], 4);
  EXPECT_NEAR(j["formats"][0]["perplexity"].get<double>(), 1 + 1.25e-5, 1e-5);
}

TEST_F(Cli, PerplexityComparesPageFormats) {
  const auto text = file("text", std::string(100, 'a') + std::string(100, 'b'));
  const std::string call = "perplexity -m " + quoted_model("model-variants/untied.gguf") +
                           " -t 1 -c 64 " + text + " --compare ";
  const auto r = run(call + "f32,float32,k=f16,v=q4,q4 --json");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto j = nlohmann::json::parse(r.out);
  EXPECT_EQ(j["reference"], "f32");
  const auto& rows = j["formats"];
  ASSERT_EQ(rows.size(), 4u);
  for (const int i : {0, 1}) {
    EXPECT_EQ(rows[i]["page_format"], "f32");
    EXPECT_EQ(rows[i]["perplexity"], rows[0]["perplexity"]);
    for (const char* key : {"kl_mean", "kl_mean_error", "kl_p99", "kl_max"})
      EXPECT_EQ(rows[i][key], 0) << key;
    EXPECT_EQ(rows[i]["same_top"], 1);
  }
  EXPECT_EQ(rows[2]["page_format"], "k=f16,v=q4");
  EXPECT_EQ(rows[2]["type_k"], "f16");
  EXPECT_EQ(rows[2]["type_v"], "q4");
  EXPECT_EQ(rows[3]["page_format"], "q4");
  for (const int i : {2, 3}) {
    EXPECT_GT(rows[i]["kl_mean"].get<double>(), 0);
    EXPECT_GE(rows[i]["kl_max"].get<double>(), rows[i]["kl_p99"].get<double>());
    EXPECT_GE(rows[i]["kl_p99"].get<double>(), rows[i]["kl_mean"].get<double>());
  }
  EXPECT_GT(rows[0]["bytes_per_token"], rows[2]["bytes_per_token"]);
  EXPECT_GT(rows[2]["bytes_per_token"], rows[3]["bytes_per_token"]);

  const auto table = run(call + "q8,q4");
  EXPECT_NE(table.out.find("KL divergence from q8"), std::string::npos) << table.out;
  EXPECT_NE(table.out.find("| 0.000000 | 0.000000 | 0.000000 | 100.00 % |"), std::string::npos)
      << table.out;
  const struct {
    const char* list;
    const char* names;
  } bad[] = {{"f16,q5", "q5"},   {"f16,", "\"\""},         {"k=f16", "k=f16"},
             {"v=f16", "v=f16"}, {"k=f16,q8", "k=f16,q8"}, {"k=,v=q8", "\"\""}};
  for (const auto& b : bad) {
    const auto e = run(call + b.list);
    EXPECT_EQ(e.code, 2) << b.list << e.out;
    EXPECT_NE(e.err.find(b.names), std::string::npos) << e.err;
  }
}

TEST_F(Cli, PerplexityNeedsOneChunkWithinTheModelsContext) {
  const auto text = file("text", std::string(100, 'a'));
  const auto shorter = run("perplexity -m toy: -t 1 " + text);
  EXPECT_EQ(shorter.code, 2);
  EXPECT_NE(shorter.err.find("100 tokens, one chunk needs 512"), std::string::npos) << shorter.err;
  EXPECT_EQ(run("perplexity -m toy: -t 1 -c 100 " + text).code, 0);
  const auto longer = run("perplexity -m toy: -t 1 -c 5000 " + text);
  EXPECT_EQ(longer.code, 2);
  EXPECT_NE(longer.err.find("context 5000"), std::string::npos) << longer.err;
  EXPECT_NE(longer.err.find("4096"), std::string::npos) << longer.err;
  EXPECT_EQ(run("perplexity -m toy: -t 1 -c 64 --num-blocks 1 --no-dynamic " + text).code, 6);
  EXPECT_EQ(run("perplexity -m toy: -t 1 -c 3 " + file("bad", "\xff\xc3\x28")).code, 0);
}

TEST_F(Cli, BenchTimesOneAttentionCase) {
  const auto r =
      run("bench --attention --heads 6/2 --head-dim 64 --context 600 --new-tokens 5 "
          "--num-seqs 3 -t 1,2 --kv-cache-dtype q4 -r 3 -o json");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto rows = nlohmann::json::parse(r.out);
  ASSERT_EQ(rows.size(), 2u);
  for (const auto& row : rows) {
    EXPECT_EQ(row["case"], "6/2 x 64 q4, 5 of 600 x 3");
    EXPECT_EQ(row["bytes"], 3 * 600 * 2 * 2 * (32 + 4));
    EXPECT_EQ(row["flops"], 3 * (596 + 597 + 598 + 599 + 600) * 4 * 64 * 6);
    EXPECT_EQ(row["samples_ms"].size(), 3u);
    for (const char* key : {"ms", "gb_s", "gflop_s"}) EXPECT_GT(row[key].get<double>(), 0) << key;
  }
  EXPECT_EQ(rows[1]["threads"], 2);
  EXPECT_FALSE(rows[0].contains("speedup"));
  EXPECT_EQ(run("bench --attention --context 64 -r 1 -ctk q8 -ctv f16 -t 1").code, 0);
  EXPECT_EQ(run("bench --attention --context 64 -r 1 -t 1", "PAGEDKV_KERNELS=mmx").code, 2);
  const struct {
    const char* args;
    const char* names;
  } bad[] = {{"--context 64 --shared-tokens 64", "shared=64"},
             {"--heads 7/2", "7/2"},
             {"--heads x", "--heads x"},
             {"--heads 0/0", "0/0"},
             {"--context 4 --new-tokens 5", "--new-tokens 5"},
             {"--head-dim 513", "513"},
             {"--head-dim 63 --kv-cache-dtype q4", "head_dim 63"}};
  for (const auto& b : bad) {
    const auto e = run(std::string("bench --attention ") + b.args);
    EXPECT_EQ(e.code, 2) << b.args;
    EXPECT_NE(e.err.find(b.names), std::string::npos) << e.err;
  }
}

TEST_F(Cli, BenchTimesSharedPagesBesideCopiesOfThem) {
  const std::string args =
      "bench --attention --heads 6/2 --head-dim 64 --context 600 --num-seqs 4 --shared-tokens 512 "
      "-t 2 -r 3 ";
  const auto r = run(args + "-o json");
  ASSERT_EQ(r.code, 0) << r.err;
  const auto row = nlohmann::json::parse(r.out)[0];
  EXPECT_EQ(row["case"], "6/2 x 64 f16, 1 of 600 x 4, 512 shared");
  EXPECT_EQ(row["bytes"], (512 + 4 * 88) * 2 * 2 * 64 * 2);
  EXPECT_EQ(row["samples_ms"].size(), 3u);
  EXPECT_EQ(row["copied_samples_ms"].size(), 3u);
  for (const char* key : {"copied_ms", "speedup"}) EXPECT_GT(row[key].get<double>(), 0) << key;
  EXPECT_NE(run(args + "-o md").out.find("| copied ms | speedup |"), std::string::npos);
}

nlohmann::json json_of(const testing::Result& r) {
  EXPECT_EQ(r.code, 0) << r.err;
  return nlohmann::json::parse(r.out);
}

TEST_F(Cli, TheConfigurationFileSetsFlags) {
  const std::string config =
      file("c.toml",
           "kv-cache-dtype = 'q8'  # of every subcommand\n"
           "output = 'json'        # bench has it, run has not\n"
           "[run]\nmax_tokens = 7\nblock-size = 8\ndynamic = false\nstop = ['Z\\n', 'end']\n"
           "[bench]\nrepetitions = 2\n");
  const std::string args = "run -m toy: --json --config " + config;
  const auto from_file = json_of(run(args + " hello"));
  EXPECT_EQ(from_file["usage"]["completion_tokens"], 7);
  EXPECT_EQ(from_file["stats"]["page_format"], "q8");
  EXPECT_EQ(from_file["stats"]["page_size"], 8);
  // Variables go before the file, flags before variables.
  const auto mixed = json_of(run(args + " -n 5 hello", "PAGEDKV_PREDICT=6 PAGEDKV_BLOCK_SIZE=4"));
  EXPECT_EQ(mixed["usage"]["completion_tokens"], 5);
  EXPECT_EQ(mixed["stats"]["page_size"], 4);
  EXPECT_EQ(json_of(run("run -m toy: --json hello",
                        "PAGEDKV_CONFIG=" + config))["usage"]["completion_tokens"],
            7);
  EXPECT_EQ(json_of(run("run -m toy: --json -n 3 --config none hello",
                        "PAGEDKV_CONFIG=" + config))["stats"]["page_format"],
            "f16");
}

TEST_F(Cli, TheConfigurationFileHasAPlace) {
  std::filesystem::create_directories(dir / "pagedkv");
  std::ofstream(dir / "pagedkv/config.toml") << "predict = 4\n";
  const std::string before = "XDG_CONFIG_HOME=" + dir.string();
  EXPECT_EQ(json_of(run("run -m toy: --json hello", before))["usage"]["completion_tokens"], 4);
}

TEST_F(Cli, ABroadFlagWinsOverNarrowSettingsOfTheFile) {
  const std::string config = file("c.toml", "cache-type-k = 'q4'\n");
  EXPECT_EQ(json_of(run("run -m toy: --json -n 1 x --config " + config))["stats"]["page_format"],
            "k=q4,v=f16");
  EXPECT_EQ(json_of(run("run -m toy: --json -n 1 x --kv-cache-dtype q8 --config " +
                        config))["stats"]["page_format"],
            "q8");
}

TEST_F(Cli, BadConfigurationIsNamedWithItsLine) {
  const struct {
    const char* text;
    const char* says;
  } cases[] = {
      {"predict = 4\nfrobnicate = 1\n", "c.toml:2: frobnicate"},
      {"[fly]\nx = 1\n", "c.toml:1: [fly]"},
      {"[run]\n\noutput = 'json'\n", "c.toml:3: output"},
      {"[run.deep]\nx = 1\n", "c.toml:1: deep"},
      {"dynamic = 3\n", "c.toml:1: dynamic: must be true or false"},
      {"predict = 1979-05-27\n", "c.toml:1: predict"},
      {"predict = \n", "c.toml:1: "},
      {"x = 1\nx = 2\n", "c.toml:2: "},
      {"\n[run]\nblock-size = 999\n", "--block-size was set by"},
      {"[run]\nexact = 'maybe'\n", "c.toml:2"},
      {"system = ''\n", "c.toml:1: system: an empty text"},
      {"[run]\nstop = ['x', '']\n", "c.toml:2: stop: an empty text"},
      {"[run]\nprompt = 'x'\n", "c.toml:2: prompt"},
      {"[run]\nhelp = true\n", "c.toml:2: help"},
      {"[run]\nblock_size = 4\nblock-size = 8\n", "was set at"},
      {"seed = 99999999999999999999\n", "c.toml:1"},
  };
  for (const auto& c : cases) {
    const auto r = run("run -m toy: x --config " + file("c.toml", c.text));
    EXPECT_EQ(r.code, 2) << c.text;
    EXPECT_NE(r.err.find(c.says), std::string::npos) << c.text << r.err;
  }
  EXPECT_EQ(run("run -m toy: x --config /nonexistent.toml").code, 2);
  EXPECT_EQ(run("run -m toy: x --config /").code, 2);
  EXPECT_EQ(run("run -m toy: x --config /dev/zero").code, 2);
  EXPECT_EQ(run("run -m toy: --system= -n 2 x").code, 2);
  EXPECT_EQ(run("run -m toy: x -s 99999999999999999999").code, 2);
  EXPECT_EQ(run("run -m toy: -n 40 --num-blocks 1 x --config " +
                file("c.toml", "[run]\nno-dynamic = true\n"))
                .code,
            6);
}

TEST_F(Cli, PrintsSettingsWithTheirSources) {
  const std::string config = file("c.toml", "[run]\nstop = ['a\"b', 'c']\ntop-p = 0.5\n");
  const std::string args = "run -m toy: --print-config --no-dynamic --config " + config;
  const auto r = run(args, "PAGEDKV_BLOCK_SIZE=4");
  EXPECT_EQ(r.code, 0) << r.err;
  for (const char* line :
       {"block-size = 4 ", "# PAGEDKV_BLOCK_SIZE", "top-p = 0.5 ", "c.toml:3", "dynamic = false ",
        "model = \"toy:\" ", "stop = [\"a\\\"b\", \"c\"]", "# num-blocks = ", "raw = false "})
    EXPECT_NE(r.out.find(line), std::string::npos) << line << " in\n" << r.out;
  // What it prints is a configuration file with the same meaning.
  const auto again = run("run --print-config --config " + file("again.toml", r.out));
  const auto settings = [](const std::string& text) {
    std::istringstream in(text);
    std::string out;
    for (std::string line; std::getline(in, line);)
      if (!line.starts_with('#')) out += line.substr(0, line.find(" # ")) + '\n';
    return out;
  };
  EXPECT_EQ(settings(again.out), settings(r.out)) << again.err;
}

TEST_F(Cli, CompletionsAndManualAreMadeFromTheFlags) {
  const std::string script = file("completion.bash", run("completion bash").out);
  const auto complete = [&](const std::string& words, int at) {
    const std::string out = (dir / "words").string();
    const std::string command = "bash -c '. " + script + "; COMP_WORDS=(" + words +
                                "); COMP_CWORD=" + std::to_string(at) +
                                "; _pagedkv; echo ${COMPREPLY[@]}' >" + out;
    EXPECT_EQ(std::system(command.c_str()), 0);
    return slurp(out);
  };
  EXPECT_EQ(complete("pagedkv be", 1), "bench\n");
  EXPECT_EQ(complete("pagedkv run --kv-cache-m", 2), "--kv-cache-memory-bytes\n");
  EXPECT_EQ(complete("pagedkv run --exact o", 3), "on off\n");
  EXPECT_EQ(complete("pagedkv run mod", 2), "\n");
  for (const char* shell : {"zsh", "fish"})
    EXPECT_NE(run(std::string("completion ") + shell).out.find("kv-cache-dtype"),
              std::string::npos);
  EXPECT_EQ(run("completion csh").code, 2);
  const auto manual = run("manual");
  EXPECT_EQ(manual.code, 0);
  EXPECT_TRUE(manual.out.starts_with(".TH PAGEDKV 1"));
  for (const char* text : {"\\-\\-kv\\-cache\\-dtype", "PAGEDKV_BLOCK_SIZE", ".SH PAGEDKV BENCH"})
    EXPECT_NE(manual.out.find(text), std::string::npos) << text;
}

TEST_F(Cli, RunTakesASystemMessageAndTemplateVariables) {
  const std::string tiny = "run -m " + quoted_model("model-variants/tied.gguf") + " -n 3 ";
  EXPECT_EQ(run(tiny + "--system 'Be brief.' Hi").out,
            run(tiny + "--raw 'system: Be brief.\nuser: Hi\nassistant:'").out);
  EXPECT_EQ(run("run -m toy: x --raw --system y").code, 2);
  EXPECT_EQ(run("run -m toy: x --chat-template-kwargs '[1]'").code, 2);
  EXPECT_EQ(run(tiny + "x --chat-template-kwargs '{\"enable_thinking\": 3}'").code, 2);
  EXPECT_EQ(run("run -m toy: x --continue", "XDG_STATE_HOME=" + dir.string()).code, 2);
  const std::string deep = "{\"a\": " + std::string(2000, '[') + std::string(2000, ']') + "}";
  EXPECT_EQ(run("run -m toy: x --chat-template-kwargs '" + deep + "'").code, 2);
}

}  // namespace
}  // namespace pagedkv
