// Files that are missing, cut, damaged, made to harm, or not for us: each is a ModelError that names the file and
// what is wrong with it. Nothing may abort.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "models/ggml/test_models.h"

namespace pagedkv::test {
namespace fs = std::filesystem;
namespace {

class HostileGguf : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("pagedkv_hostile_" + std::to_string(getpid()));
    fs::create_directory(folder_);
    std::ifstream in(model_path("model-variants/tied.gguf"), std::ios::binary);
    good_.assign(std::istreambuf_iterator<char>(in), {});
    ASSERT_GT(good_.size(), 100000u);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& bytes) const {
    const std::string path = (folder_ / "model.gguf").string();
    std::ofstream(path, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path;
  }

  // The good file with other metadata or tensors.
  std::string rewrite(const std::function<void(gguf_context*, ggml_context*)>& change) const {
    const std::string path = (folder_ / "model.gguf").string();
    rewrite_gguf(model_path("model-variants/tied.gguf"), path, change);
    return path;
  }

  static void expect_refused(const std::string& path, const std::vector<std::string>& words) {
    try {
      load(path);
      ADD_FAILURE() << "loaded; expected an error with \"" << (words.empty() ? "" : words[0])
                    << "\"";
    } catch (const ModelError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(path), std::string::npos) << text;
      for (const auto& word : words)
        EXPECT_NE(text.find(word), std::string::npos) << "no \"" << word << "\" in: " << text;
    }
  }

  // Loads and runs, or refuses with a ModelError; anything else fails. For damage whose effect is not known.
  static void load_or_refuse(const std::string& path) {
    try {
      const auto model = load(path);
      if (model->info().vocab_size < 256) return;
      const auto tokens = random_tokens(3, 1);
      all_logits(*model, tokens);
    } catch (const ModelError&) {
    }
    try {
      load_tokenizer(path)->tokenize("Hello <|end|>", true, true);
    } catch (const ModelError&) {
    }
  }

  fs::path folder_;
  std::string good_;
};

TEST_F(HostileGguf, TheFileItselfIsGood) {
  load_or_refuse(write(good_));
  load(write(good_));
}

TEST_F(HostileGguf, MissingFolderDeviceOrEmpty) {
  expect_refused((folder_ / "none.gguf").string(), {"No such file"});
  expect_refused(folder_.string(), {"not a regular file"});
  expect_refused("/dev/zero", {"not a regular file"});
  expect_refused(write(""), {"magic"});
  expect_refused(write("GGUF"), {"GGUF"});
  expect_refused(write("this is not a model"), {"magic", "19 bytes"});
}

TEST_F(HostileGguf, CutAnywhere) {
  for (size_t size = 0; size < 2000; size += 37) expect_refused(write(good_.substr(0, size)), {});
  for (size_t size = 2000; size < good_.size(); size += 4999)
    expect_refused(write(good_.substr(0, size)), {});
  expect_refused(write(good_.substr(0, good_.size() - 1000)),
                 {"cut short", std::to_string(good_.size() - 1000)});
}

TEST_F(HostileGguf, ImpossibleCounts) {
  for (const size_t at : {8u, 16u}) {  // tensors, keys
    for (const uint64_t count :
         {uint64_t{0}, uint64_t{1} << 20, uint64_t{1} << 40, uint64_t{1} << 63, ~uint64_t{0}}) {
      std::string bytes = good_;
      std::memcpy(bytes.data() + at, &count, sizeof count);
      expect_refused(write(bytes), {count < uint64_t{1} << 20 ? "" : std::to_string(count)});
    }
  }
  std::string bytes = good_;
  bytes[4] = 1;  // version
  expect_refused(write(bytes), {"v1"});
}

// Every byte of the header's first part set to each of some values, and random damage all over the header.
TEST_F(HostileGguf, DamagedHeader) {
  for (size_t at = 0; at < 700; ++at) {
    std::string bytes = good_;
    bytes[at] = static_cast<char>(bytes[at] ^ (at % 2 ? 0x80 : 0xFF));
    load_or_refuse(write(bytes));
  }
  const char* scale = std::getenv("PAGEDKV_TEST_SCALE");
  const int rounds = 300 * (scale ? std::max(1, std::atoi(scale)) : 1);
  std::mt19937_64 random(11);
  for (int i = 0; i < rounds; ++i) {
    std::string bytes = good_;
    for (int k = 0; k < 3; ++k) bytes[random() % 12000] = static_cast<char>(random());
    load_or_refuse(write(bytes));
  }
}

TEST_F(HostileGguf, KeysOutsideTheirLimits) {
  struct {
    const char* key;
    uint32_t value;
    std::vector<std::string> words;
  } const cases[] = {
      {"llama.block_count", 0, {"llama.block_count", "0", "1.."}},
      {"llama.block_count", 0xFFFFFFFFu, {"llama.block_count", "4294967295"}},
      {"llama.block_count", 3, {"blk.2.", "missing"}},
      {"llama.block_count", 1, {"blk.1.", "not known"}},
      {"llama.embedding_length", 0, {"llama.embedding_length"}},
      {"llama.embedding_length", 128, {"[64, 288]", "[128, 288]"}},
      {"llama.feed_forward_length", 95, {"shape", "95"}},
      {"llama.attention.head_count", 0, {"llama.attention.head_count", "0"}},
      {"llama.attention.head_count", 3, {"3", "multiple"}},
      {"llama.attention.head_count", 8, {"shape"}},
      {"llama.attention.head_count_kv", 3, {"4", "3", "multiple"}},
      {"llama.attention.head_count_kv", 1u << 31, {"2147483648"}},
      {"llama.attention.key_length", 0, {"key_length"}},
      {"llama.attention.key_length", 513, {"key_length", "513", "512"}},
      {"llama.attention.value_length", 0xFFFFFFFFu, {"value_length"}},
      {"llama.context_length", 0, {"context_length"}},
      {"llama.context_length", 0xFFFFFFFFu, {"context_length", "4294967295"}},
      {"llama.rope.dimension_count", 18, {"dimension_count", "18", "16"}},
      {"llama.rope.dimension_count", 7, {"dimension_count", "7", "even"}},
      {"llama.rope.dimension_count", 0, {"dimension_count"}},
      {"llama.rope.scaling.original_context_length", 0, {"original_context_length"}},
      {"llama.expert_count", 8, {"expert_count", "8", "dense"}},
      {"llama.attention.sliding_window", 1u << 31, {"sliding_window", "2147483648"}},
      {"general.alignment", 8, {"alignment"}},
      {"general.alignment", 0, {"alignment"}},
      {"general.alignment", 3u << 30, {"alignment"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(std::string(c.key) + " = " + std::to_string(c.value));
    if (std::string(c.key) == "general.alignment") {  // gguf's own writer would not write it
      std::string bytes = good_;
      const std::string name = "llama.vocab_size";
      const size_t at = bytes.find(name);
      ASSERT_NE(at, std::string::npos);
      bytes.replace(at - 8, 8 + name.size() + 8,
                    std::string("\x11\0\0\0\0\0\0\0", 8) + c.key + std::string("\4\0\0\0", 4) +
                        std::string(reinterpret_cast<const char*>(&c.value), 4));
      expect_refused(write(bytes), {});
      continue;
    }
    expect_refused(
        rewrite([&](gguf_context* g, ggml_context*) { gguf_set_val_u32(g, c.key, c.value); }),
        c.words);
  }
}

TEST_F(HostileGguf, NumbersThatAreNone) {
  for (const float bad : {0.0f / 0.0f, 1e30f, -1.0f}) {
    for (const char* key : {"llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base",
                            "llama.rope.scaling.factor", "llama.rope.scaling.attn_factor"}) {
      SCOPED_TRACE(key);
      expect_refused(
          rewrite([&](gguf_context* g, ggml_context*) { gguf_set_val_f32(g, key, bad); }), {key});
    }
  }
}

TEST_F(HostileGguf, KeysOfTheWrongType) {
  for (const char* key :
       {"llama.block_count", "llama.attention.head_count", "llama.attention.head_count_kv",
        "llama.embedding_length", "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base",
        "llama.expert_count", "split.count"}) {
    SCOPED_TRACE(key);
    expect_refused(
        rewrite([&](gguf_context* g, ggml_context*) { gguf_set_val_str(g, key, "two"); }),
        {key, "str"});
    const char* words[] = {"a", "b"};
    expect_refused(
        rewrite([&](gguf_context* g, ggml_context*) { gguf_set_arr_str(g, key, words, 2); }),
        {key, "arr"});
  }
  for (const char* key :
       {"general.architecture", "general.name", "general.type", "llama.rope.scaling.type"}) {
    SCOPED_TRACE(key);
    expect_refused(rewrite([&](gguf_context* g, ggml_context*) { gguf_set_val_u32(g, key, 7); }),
                   {key, "u32"});
  }
}

TEST_F(HostileGguf, ArraysOfHeads) {
  const auto with = [&](std::vector<uint32_t> heads) {
    return rewrite([&](gguf_context* g, ggml_context*) {
      gguf_set_arr_data(g, "llama.attention.head_count_kv", GGUF_TYPE_UINT32, heads.data(),
                        heads.size());
    });
  };
  load(with({4, 4}));  // one value for all layers, written once for each
  expect_refused(with({4, 2}), {"head_count_kv", "differs between layers"});
  expect_refused(with({}), {"head_count_kv", "empty"});
}

TEST_F(HostileGguf, WhatIsNotSupportedIsNamedWithWhatIs) {
  expect_refused(rewrite([](gguf_context* g, ggml_context*) {
                   gguf_set_val_str(g, "general.architecture", "gpt2");
                 }),
                 {"gpt2", "llama", "Try"});
  expect_refused(
      rewrite([](gguf_context* g, ggml_context*) { gguf_remove_key(g, "general.architecture"); }),
      {"general.architecture", "missing"});
  expect_refused(rewrite([](gguf_context* g, ggml_context*) {
                   gguf_set_val_str(g, "general.type", "adapter");
                 }),
                 {"adapter"});
  expect_refused(
      rewrite([](gguf_context* g, ggml_context*) { gguf_set_val_u16(g, "split.count", 3); }),
      {"split", "--merge"});
  expect_refused(rewrite([](gguf_context* g, ggml_context*) {
                   gguf_set_val_str(g, "llama.rope.scaling.type", "longrope");
                 }),
                 {"longrope", "yarn"});
}

TEST_F(HostileGguf, KeysThatMayChangeTheMathematics) {
  for (const char* key : {"llama.attention.scale", "llama.logit_scale",
                          "llama.attn_logit_softcapping", "llama.unheard_of"}) {
    SCOPED_TRACE(key);
    expect_refused(rewrite([&](gguf_context* g, ggml_context*) { gguf_set_val_f32(g, key, 2.0f); }),
                   {key, "not known"});
  }
  expect_refused(rewrite([](gguf_context* g, ggml_context*) {
                   gguf_set_val_bool(g, "llama.attention.causal", false);
                 }),
                 {"llama.attention.causal"});
  load(
      rewrite([](gguf_context* g, ggml_context*) {  // said in other words, but the same mathematics
        gguf_set_val_bool(g, "llama.attention.causal", true);
        gguf_set_val_u32(g, "llama.expert_count", 0);
        gguf_set_val_u32(g, "llama.attention.sliding_window", 512);
        gguf_set_val_str(g, "general.author", "somebody");
        gguf_set_val_u64(g, "llama.block_count", 2);
      }));
}

TEST_F(HostileGguf, WindowsThatMakeNoSense) {
  const auto refused = [&](const auto& change, const std::vector<std::string>& words) {
    const std::string path = (folder_ / "window.gguf").string();
    rewrite_gguf(model_path("model-variants/gemma3.gguf"), path,
                 [&](gguf_context* g, ggml_context*) { change(g); });
    expect_refused(path, words);
  };
  const char* const pattern = "gemma3.attention.sliding_window_pattern";
  const bool six[6] = {true, true};
  refused([&](gguf_context* g) { gguf_set_arr_data(g, pattern, GGUF_TYPE_BOOL, six, 6); },
          {pattern, "6", "7 layers"});
  const int32_t mixed[7] = {1, 1, 0};
  refused([&](gguf_context* g) { gguf_set_arr_data(g, pattern, GGUF_TYPE_INT32, mixed, 7); },
          {pattern, "differs"});
  refused([&](gguf_context* g) { gguf_set_val_u32(g, pattern, 5000); }, {pattern, "5000", "1024"});
  refused([&](gguf_context* g) { gguf_set_val_str(g, pattern, "six"); }, {pattern, "integer"});
  refused([&](gguf_context* g) { gguf_set_val_f32(g, "gemma3.rope.freq_base_swa", 0.0f); },
          {"rope.freq_base_swa"});
  refused([&](gguf_context* g) { gguf_set_val_f32(g, "gemma3.final_logit_softcapping", -1.0f); },
          {"final_logit_softcapping"});
  // Keys of one family mean nothing in another.
  expect_refused(rewrite([](gguf_context* g, ggml_context*) {
                   gguf_set_val_u32(g, "llama.attention.sliding_window_pattern", 6);
                 }),
                 {"llama.attention.sliding_window_pattern", "not known"});
}

TEST_F(HostileGguf, TensorsThatNobodyReads) {
  // The second is read with attn_qkv.weight alone, which the file does not have.
  for (const char* name : {"blk.0.attn_q_norm.weight", "blk.0.attn_qkv.bias"}) {
    expect_refused(rewrite([&](gguf_context* g, ggml_context* c) {
                     ggml_context* own = ggml_init({4096, nullptr, true});
                     ggml_tensor* extra = ggml_new_tensor_1d(own, GGML_TYPE_F32, 192);
                     extra->data = ggml_get_tensor(c, "token_embd.weight")->data;
                     ggml_set_name(extra, name);
                     gguf_add_tensor(g, extra);
                     ggml_free(own);
                   }),
                   {name, "not known"});
  }
}

TEST_F(HostileGguf, TensorsOfTheWrongType) {
  expect_refused(rewrite([](gguf_context* g, ggml_context*) {
                   gguf_set_tensor_type(g, "blk.0.attn_norm.weight", GGML_TYPE_F16);
                 }),
                 {"blk.0.attn_norm.weight", "f16", "f32"});
  expect_refused(rewrite([](gguf_context* g, ggml_context*) {
                   gguf_set_tensor_type(g, "blk.1.ffn_up.weight", GGML_TYPE_I32);
                 }),
                 {"blk.1.ffn_up.weight", "i32"});
}

TEST_F(HostileGguf, VocabulariesThatCannotBeRead) {
  const auto expect_no_text = [](const std::string& path, const char* word) {
    try {
      load_tokenizer(path);
      ADD_FAILURE() << "read; expected " << word;
    } catch (const ModelError& error) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  };
  const auto with = [&](const std::function<void(gguf_context*)>& change) {
    return rewrite([&](gguf_context* g, ggml_context*) { change(g); });
  };
  expect_no_text(with([](gguf_context* g) { gguf_remove_key(g, "tokenizer.ggml.model"); }),
                 "tokenizer.ggml.model");
  expect_no_text(
      with([](gguf_context* g) { gguf_set_val_str(g, "tokenizer.ggml.model", "no_vocab"); }),
      "no_vocab");
  expect_no_text(with([](gguf_context* g) { gguf_set_val_u32(g, "tokenizer.ggml.model", 1); }),
                 "tokenizer.ggml.model");
  expect_no_text(with([](gguf_context* g) { gguf_remove_key(g, "tokenizer.ggml.tokens"); }),
                 "tokenizer.ggml.tokens");
  expect_no_text(with([](gguf_context* g) { gguf_remove_key(g, "tokenizer.ggml.merges"); }),
                 "merges");
  expect_no_text(
      with([](gguf_context* g) { gguf_set_val_str(g, "tokenizer.ggml.pre", "unheard-of"); }),
      "unheard-of");
  std::vector<const char*> twice(288, "same");
  expect_no_text(with([&](gguf_context* g) {
                   gguf_set_arr_str(g, "tokenizer.ggml.tokens", twice.data(), twice.size());
                 }),
                 "\"same\" twice");
  std::vector<const char*> few(17, "");
  expect_refused(with([&](gguf_context* g) {
                   gguf_set_arr_str(g, "tokenizer.ggml.tokens", few.data(), few.size());
                 }),
                 {"17", "288"});
}

TEST_F(HostileGguf, ABrokenTemplateSpoilsNothingButItself) {
  const auto tokenizer = load_tokenizer(rewrite([](gguf_context* g, ggml_context*) {
    gguf_set_val_str(g, "tokenizer.chat_template", "{% for %}");
  }));
  EXPECT_EQ(tokenizer->tokenize("A", true, true), std::vector<int32_t>{'A'});
  const ChatMessage message{"user", "Hi"};
  try {
    make_chat_template(*tokenizer)->render({&message, 1});
    ADD_FAILURE() << "rendered";
  } catch (const ModelError& error) {
    EXPECT_NE(std::string(error.what()).find("chat_template"), std::string::npos) << error.what();
  }
}

// llama-common's parser recurses and would end the program.
TEST_F(HostileGguf, ATemplateNestedTooDeepIsRefused) {
  std::string blocks;
  for (int i = 0; i < 20000; ++i) blocks += "{% if 1 %}";
  for (const std::string& source :
       {"{{ " + std::string(100000, '(') + "1", "{{ " + std::string(20000, '[') + " }}", blocks,
        std::string(2 << 20, 'x')}) {
    const auto tokenizer = load_tokenizer(rewrite([&](gguf_context* g, ggml_context*) {
      gguf_set_val_str(g, "tokenizer.chat_template", source.c_str());
    }));
    const ChatMessage message{"user", "Hi"};
    EXPECT_THROW(make_chat_template(*tokenizer)->render({&message, 1}), ModelError)
        << source.substr(0, 20);
  }
}

TEST_F(HostileGguf, WhatATemplateRefusesIsAnArgumentsFault) {
  const auto tokenizer = load_tokenizer(rewrite([](gguf_context* g, ggml_context*) {
    gguf_set_val_str(g, "tokenizer.chat_template",
                     "{{ raise_exception('only one message, please') }}");
  }));
  const ChatMessage message{"user", "Hi"};
  try {
    make_chat_template(*tokenizer)->render({&message, 1});
    ADD_FAILURE() << "rendered";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("only one message"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace pagedkv::test
