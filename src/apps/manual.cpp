#include "apps/manual.h"

#include <algorithm>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "apps/cli.h"

namespace pagedkv::apps {
namespace {

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* each) { return !each->get_group().empty(); });
}

std::vector<const CLI::Option*> options_of(const CLI::App& command) {
  std::vector<const CLI::Option*> out;
  for (const CLI::Option* option : command.get_options())
    if (!option->get_group().empty()) out.push_back(option);
  return out;
}

// "-t", "--threads", "--no-dynamic": what may be typed.
std::vector<std::string> spellings(const CLI::Option& option) {
  std::vector<std::string> out;
  for (const auto& name : option.get_snames()) out.push_back(std::string("-").append(name));
  for (const auto& name : option.get_lnames()) out.push_back(std::string("--").append(name));
  return out;
}

// The words of "TEXT:{auto,on,off}"; empty where any text is taken.
std::vector<std::string> choices(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const size_t open = type.find('{'), close = type.rfind('}');
  std::vector<std::string> out;
  if (open == std::string::npos || close == std::string::npos) return out;
  std::istringstream words(type.substr(open + 1, close - open - 1));
  for (std::string word; std::getline(words, word, ',');) out.push_back(word);
  return out;
}

bool takes_value(const CLI::Option& option) { return option.get_expected_max() > 0; }

std::string in_quotes(const std::string& text) { return std::string(1, '\'').append(text) += '\''; }

// Every occurrence of a character of `special` gets `mark` before it.
std::string marked(const std::string& text, const std::string& special, const std::string& mark) {
  std::string out;
  for (const char c : text) {
    if (special.find(c) != std::string::npos) out += mark;
    out += c;
  }
  return out;
}

std::string names(const std::vector<const CLI::App*>& commands) {
  std::string out;
  for (const CLI::App* c : commands) out += (out.empty() ? "" : " ") + c->get_name();
  return out;
}

void write_bash(const CLI::App& app, std::ostream& out) {
  const auto commands = commands_of(app);
  out << "# bash completion for pagedkv: source it, or put it into bash-completion's folder.\n"
         "_pagedkv() {\n"
         "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} "
         "command=${COMP_WORDS[1]}\n"
         "  COMPREPLY=()\n"
         "  if [ \"$COMP_CWORD\" = 1 ]; then\n"
         "    COMPREPLY=($(compgen -W '"
      << names(commands) << " --help --version' -- \"$word\"))\n    return\n  fi\n"
      << "  case \"$command $before\" in\n";
  for (const CLI::App* command : commands)
    for (const CLI::Option* option : options_of(*command))
      if (const auto words = choices(*option); !words.empty() && !spellings(*option).empty()) {
        std::vector<std::string> patterns;
        for (const auto& name : spellings(*option))
          patterns.push_back(in_quotes(command->get_name() + " " + name));
        out << "    " << joined(patterns, "|") << ") COMPREPLY=($(compgen -W '"
            << joined(words, " ") << "' -- \"$word\")); return ;;\n";
      }
  out << "  esac\n  case \"$word\" in -*) ;; *) return ;; esac\n  case \"$command\" in\n";
  for (const CLI::App* command : commands) {
    std::vector<std::string> all;
    for (const CLI::Option* option : options_of(*command))
      for (const auto& name : spellings(*option)) all.push_back(name);
    out << "    " << command->get_name() << ") COMPREPLY=($(compgen -W '" << joined(all, " ")
        << "' -- \"$word\")) ;;\n";
  }
  out << "  esac\n}\ncomplete -o default -F _pagedkv pagedkv\n";
}

void write_zsh(const CLI::App& app, std::ostream& out) {
  const auto commands = commands_of(app);
  const auto text = [](const std::string& s) { return marked(s, "'", "'\\'"); };
  out << "#compdef pagedkv\n"
         "# zsh completion for pagedkv: put it as _pagedkv into a folder of $fpath.\n"
         "_pagedkv() {\n  if (( CURRENT == 2 )); then\n    local -a commands=(\n";
  for (const CLI::App* c : commands)
    out << "      '" << c->get_name() << ':' << text(marked(c->get_description(), ":", "\\"))
        << "'\n";
  out << "    )\n    _describe command commands\n    return\n  fi\n  local command=$words[2]\n  (( "
         "CURRENT-- ))\n"
         "  shift words\n  case $command in\n";
  for (const CLI::App* c : commands) {
    out << "    " << c->get_name() << ")\n      _arguments -s";
    for (const CLI::Option* option : options_of(*c))
      for (const auto& name : spellings(*option)) {
        out << " \\\n        '*" << name << (takes_value(*option) && name.size() > 2 ? "=" : "")
            << '[' << text(marked(option->get_description(), "[]\\", "\\")) << ']';
        if (takes_value(*option)) {
          const auto words = choices(*option);
          out << ":value:";
          if (words.empty())
            out << "_files";
          else
            out << '(' << joined(words, " ") << ')';
        }
        out << '\'';
      }
    out << " \\\n        '*:file:_files' ;;\n";
  }
  out << "  esac\n}\n_pagedkv \"$@\"\n";
}

void write_fish(const CLI::App& app, std::ostream& out) {
  const auto commands = commands_of(app);
  const auto text = [](const std::string& s) { return in_quotes(marked(s, "\\'", "\\")); };
  out << "# fish completion for pagedkv: put it into ~/.config/fish/completions/pagedkv.fish.\n";
  for (const CLI::App* c : commands)
    out << "complete -c pagedkv -n __fish_use_subcommand -f -a " << c->get_name() << " -d "
        << text(c->get_description()) << '\n';
  for (const CLI::App* c : commands)
    for (const CLI::Option* option : options_of(*c)) {
      if (spellings(*option).empty()) continue;
      out << "complete -c pagedkv -n '__fish_seen_subcommand_from " << c->get_name() << '\'';
      for (const auto& name : option->get_snames()) out << " -s " << name;
      for (const auto& name : option->get_lnames()) out << " -l " << name;
      if (takes_value(*option)) out << " -r";
      if (const auto words = choices(*option); !words.empty())
        out << " -f -a " << text(joined(words, " "));
      out << " -d " << text(option->get_description()) << '\n';
    }
}

// troff reads a leading . or ' as a request, and - as a hyphen.
std::string troff(const std::string& text) {
  std::string out;
  if (text.starts_with('.') || text.starts_with('\'')) out = "\\&";
  return out += marked(text, "-\\", "\\");
}

void write_manual(const CLI::App& app, std::ostream& out) {
  const auto commands = commands_of(app);
  out << ".TH PAGEDKV 1 \"\" \"pagedkv " PAGEDKV_VERSION_TEXT
         "\" \"User Commands\"\n"
         ".SH NAME\npagedkv \\- run language models on a paged KV cache\n.SH SYNOPSIS\n";
  for (const CLI::App* c : commands)
    out << ".B pagedkv " << c->get_name() << "\n.RI [ option ...]\n.br\n";
  out << ".SH DESCRIPTION\n" << troff(app.get_description()) << '\n';
  for (const CLI::App* c : commands) {
    std::string title = std::string("pagedkv ").append(c->get_name());
    std::ranges::transform(title, title.begin(), [](unsigned char x) { return std::toupper(x); });
    out << ".SH " << title << '\n' << troff(c->get_description()) << ".\n";
    for (const CLI::Option* option : options_of(*c)) {
      const auto all = spellings(*option);
      const std::string label = all.empty() ? option->get_name(true) : joined(all, ", ");
      out << ".TP\n.B " << troff(label);
      if (takes_value(*option) && !all.empty())
        out << " \\fI" << troff(option->get_type_name()) << "\\fR";
      out << '\n' << troff(option->get_description());
      if (!option->get_default_str().empty())
        out << " (default: " << troff(option->get_default_str()) << ")";
      if (!option->get_envname().empty())
        out << "\n.br\nVariable: " << troff(option->get_envname());
      out << '\n';
    }
  }
  out << ".SH FILES\n"
         ".TP\n.I ~/.config/pagedkv/config.toml\nsettings: keys are the long names of flags, at "
         "the top or in a section named "
         "as the subcommand ($XDG_CONFIG_HOME)\n"
         ".TP\n.I ~/.cache/pagedkv\nthe small model ($XDG_CACHE_HOME, PAGEDKV_CACHE_DIR)\n"
         ".TP\n.I ~/.local/state/pagedkv/conversation.json\nthe last conversation, for run "
         "\\-\\-continue "
         "($XDG_STATE_HOME)\n"
         ".SH EXIT STATUS\n"
         "0 done; 1 failed; 2 wrong usage; 3 a result that differs from the reference; 4 model not "
         "supported or broken; 5 environment; 6 does "
         "not fit.\n";
}

}  // namespace

void add_manual(CLI::App& app, std::function<int()>& command) {
  auto shell = std::make_shared<std::string>();
  auto* completion = app.add_subcommand("completion", "print a shell's completion script");
  completion->add_option("shell", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  const auto print = [&app, &command](void (*write)(const CLI::App&, std::ostream&)) {
    command = [&app, write] {
      write(app, std::cout);
      if (!std::cout.flush()) throw std::runtime_error("standard output: cannot be written");
      return kOk;
    };
  };
  completion->parse_complete_callback([shell, print] {
    print(*shell == "bash" ? write_bash : *shell == "zsh" ? write_zsh : write_fish);
  });
  app.add_subcommand("manual", "print the manual page (pagedkv manual | man -l -)")
      ->parse_complete_callback([print] { print(write_manual); });
}

}  // namespace pagedkv::apps
