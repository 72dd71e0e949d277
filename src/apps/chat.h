// `pagedkv run` at a terminal: a conversation, turn by turn. Keys and values of what was said stay in the pool, so that a turn
// computes its new tokens alone.
#pragma once

#include <functional>
#include <string>

#include "apps/cli.h"
#include "apps/conversation.h"
#include "engine/engine.h"

namespace pagedkv::apps {

struct Chat {
  Engine& engine;
  PagePool& pool;
  const LoadedModel& model;
  Conversation conversation;
  TemplateKwargs template_kwargs;
  GenerationRequest request;  // of every turn, without its prompt
  std::string save_path;      // after each turn
};

// Runs until the user ends it; returns the exit code.
int chat(Chat chat);

}  // namespace pagedkv::apps
