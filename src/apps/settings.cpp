#include "apps/settings.h"

#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "apps/cli.h"
#include "base/bounded_text.h"
#include "pagedkv/base/log.h"

namespace pagedkv::apps {
namespace {

enum Rank { kFile, kVariable, kFlag };

constexpr const char* kFileVariable = "PAGEDKV_CONFIG";

// A flag on the left, where it comes from a higher source, wins over those that refine it.
struct Refined {
  const char* flag;
  std::vector<const char*> by;
};
const Refined kRefined[] = {{"--kv-cache-dtype", {"--cache-type-k", "--cache-type-v"}}};

std::vector<std::string> long_names(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const auto& name : option.get_lnames()) names.push_back("--" + name);
  for (const auto& name : option.get_fnames())
    if (!std::ranges::count(names, "--" + name)) names.push_back("--" + name);
  return names;
}

// Whether the command line has the option.
bool given(const std::vector<std::string>& args, const CLI::Option& option) {
  const auto names = long_names(option);
  for (const auto& arg : args) {
    if (arg == "--") return false;
    for (const auto& name : names)
      if (arg == name || arg.starts_with(name + "=")) return true;
    for (const auto& name : option.get_snames())
      if (arg.starts_with("-" + name)) return true;
  }
  return false;
}

// The last value of a flag on the command line.
std::optional<std::string> value_of(const std::vector<std::string>& args, const std::string& name) {
  std::optional<std::string> out;
  for (size_t i = 0; i < args.size() && args[i] != "--"; ++i) {
    if (args[i].starts_with(name + "=")) out = args[i].substr(name.size() + 1);
    if (args[i] == name && i + 1 < args.size()) out = args[i + 1];
  }
  return out;
}

bool is_flag(const CLI::Option& option) { return option.get_expected_max() == 0; }
bool takes_many(const CLI::Option& option) {
  return option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
}

// Prompts, files to read, help and the like have no variable and are no settings; nor is the file's own name.
bool is_setting(const CLI::Option& option) {
  return !option.get_envname().empty() && option.get_envname() != kFileVariable;
}

// With _ as good as -.
std::string name_of(std::string key) {
  std::ranges::replace(key, '_', '-');
  return key;
}

// The setting that has the name; null where there is none.
const CLI::Option* find_option(const CLI::App& sub, const std::string& key) {
  for (const CLI::Option* option : sub.get_options())
    if (is_setting(*option) && std::ranges::count(option->get_lnames(), name_of(key)))
      return option;
  return nullptr;
}

// Whether `key` is the flag's other name, which turns it off.
bool is_negative(const CLI::Option& option, const std::string& key) {
  return std::ranges::count(option.get_fnames(), name_of(key)) > 0;
}

struct File {
  static constexpr int64_t kMostBytes = 1 << 20;
  std::string path;

  [[noreturn]] void fail(const toml::source_region& where, const std::string& what) const {
    throw std::invalid_argument(place(where) + ": " + what);
  }
  std::string place(const toml::source_region& where) const {
    return path + ":" + std::to_string(where.begin.line);
  }

  toml::table parse() const {
    std::string text;
    try {
      text = read_regular_file(path, kMostBytes);
    } catch (const std::runtime_error& error) {
      throw std::invalid_argument("--config " + path + ": " + error.what());
    }
    try {
      return toml::parse(text, path);
    } catch (const toml::parse_error& error) {
      fail(error.source(), std::string(error.description()));
    }
  }

  std::string scalar(const std::string& key, const toml::node& node) const {
    if (const auto* text = node.as_string()) return text->get();
    if (const auto* integer = node.as_integer()) return std::to_string(integer->get());
    if (const auto* real = node.as_floating_point()) return shortest(real->get());
    if (const auto* yes = node.as_boolean()) return yes->get() ? "true" : "false";
    fail(node.source(), key + ": must be a text, a number, true or false, or a list of these");
  }

  std::vector<std::string> values(const std::string& key, const toml::node& node,
                                  const CLI::Option& option) const {
    if (is_flag(option) && !node.is_boolean()) fail(node.source(), key + ": must be true or false");
    std::vector<std::string> out;
    if (const toml::array* list = node.as_array())
      for (const toml::node& item : *list) out.push_back(scalar(key, item));
    else
      out = {scalar(key, node)};
    for (const auto& value : out)  // CLI11 would take the next argument for an empty one
      if (value.empty() || value == "{}" || value.find('\0') != std::string::npos)
        fail(node.source(), key + ": an empty text, {} or a zero byte is no value");
    if (takes_many(option) || out.size() < 2) return out;
    return {joined(out, ",")};
  }
};

// TOML's basic strings are escaped as JSON's are.
std::string quoted(const std::string& text) {
  std::string out =
      nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  for (size_t at; (at = out.find('\x7f')) != std::string::npos;) out.replace(at, 1, "\\u007f");
  return out;
}

std::string as_toml(const CLI::Option& option, const std::string& value) {
  if (is_flag(option)) return value;
  double x = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), x);
  const bool number = error == std::errc() && end == value.data() + value.size();
  return number ? value : quoted(value);
}

}  // namespace

std::string configuration_path() {
  return own_folder("XDG_CONFIG_HOME", "/.config") + "/config.toml";
}

// Both are read before and after parsing, not by it.
void add_configuration(CLI::App& sub) {
  auto* group = "Configuration";
  sub.add_option_function<std::string>(
         "--config", [](const std::string&) {},
         "TOML file with settings, or none (default: " + configuration_path() + ")")
      ->type_name("FILE")
      ->envname(kFileVariable)
      ->take_last()
      ->group(group);
  sub.add_flag_callback(
         "--print-config", [] {}, "print every setting with its source, as TOML, and stop")
      ->group(group);
}

Settings::Settings(const CLI::App& app, const CLI::App& sub, std::vector<std::string>& args) {
  check_values(sub, args);
  take_flags(sub, args);
  take_variables(sub);
  take_file(app, sub, args);
  drop_overruled(sub);
  std::vector<std::string> added;
  for (const Setting& s : settings_)
    for (const auto& value : s.values) added.push_back(long_names(*s.option).front() + "=" + value);
  args.insert(args.begin() + 1, added.begin(), added.end());
}

// CLI11 would take the next argument for the value of --flag=.
void Settings::check_values(const CLI::App& sub, const std::vector<std::string>& args) {
  for (const auto& arg : args) {
    if (arg == "--") return;
    if (!arg.starts_with("--") || !arg.ends_with('=')) continue;
    for (const CLI::Option* option : sub.get_options())
      if (std::ranges::count(long_names(*option), arg.substr(0, arg.size() - 1)))
        throw std::invalid_argument(arg + " has no value; leave the flag out instead");
  }
}

void Settings::take_flags(const CLI::App& sub, const std::vector<std::string>& args) {
  for (const CLI::Option* option : sub.get_options())
    if (given(args, *option)) settings_.push_back({option, kFlag, "flag", {}});
}

void Settings::take_variables(const CLI::App& sub) {
  for (const CLI::Option* option : sub.get_options()) {
    const std::string variable = option->get_envname();
    const char* value = variable.empty() ? nullptr : std::getenv(variable.c_str());
    if (!value) continue;
    const bool blank = std::string_view(value).find_first_not_of(" \t") == std::string_view::npos;
    if (!blank && !find(*option)) settings_.push_back({option, kVariable, variable, {value}});
    unsetenv(
        variable.c_str());  // CLI11 would read it once more, and drops bad values in some versions
  }
}

void Settings::take_file(const CLI::App& app, const CLI::App& sub,
                         const std::vector<std::string>& args) {
  std::optional<std::string> asked = value_of(args, "--config");
  for (const Setting& s : settings_)
    if (!asked && !s.values.empty() && s.option->get_envname() == kFileVariable)
      asked = s.values[0];
  const File file{asked.value_or(configuration_path())};
  if (file.path == "none") return;
  std::error_code none;
  if (!std::filesystem::exists(file.path, none)) {
    if (asked) throw std::invalid_argument("--config " + file.path + ": there is no such file");
    return;
  }
  path_ = file.path;
  const toml::table table = file.parse();

  const auto take = [&](const toml::table& keys, const CLI::App& command, bool needed) {
    for (const auto& [name, node] : keys) {
      const std::string key(name.str());
      if (node.is_table()) {
        if (needed) file.fail(node.source(), key + ": a subcommand's section has no sections");
        continue;
      }
      const CLI::Option* option = find_option(command, key);
      if (!option && needed)
        file.fail(node.source(), key + ": pagedkv " + command.get_name() + " has no such setting");
      if (!option || &command != &sub) continue;
      std::vector<std::string> values = file.values(key, node, *option);
      if (is_negative(*option, key)) values = {values[0] == "true" ? "false" : "true"};
      const Setting* before = find(*option);
      if (before && before->rank == kFile && needed == before->in_section)
        file.fail(node.source(), key + ": was set at " + before->source + " already");
      if (!before && !values.empty())
        settings_.push_back({option, kFile, file.place(node.source()), values, needed});
    }
  };
  for (const auto& [name, node] : table) {
    const std::string key(name.str());
    const auto commands = app.get_subcommands(
        [&](const CLI::App* each) { return !node.is_table() || each->check_name(key); });
    if (node.is_table() && commands.empty())
      file.fail(node.source(), "[" + key + "]: there is no such subcommand");
    if (node.is_table()) {
      take(*node.as_table(), *commands[0], true);
    } else if (std::ranges::none_of(
                   commands, [&](const CLI::App* each) { return find_option(*each, key); })) {
      file.fail(node.source(), key + ": no subcommand has such a setting");
    }
  }
  take(table, sub, false);  // after the section, which is narrower
}

const Settings::Setting* Settings::find(const CLI::Option& option) const {
  const auto found =
      std::ranges::find_if(settings_, [&](const Setting& s) { return s.option == &option; });
  return found == settings_.end() ? nullptr : &*found;
}

void Settings::drop_overruled(const CLI::App& sub) {
  for (const Refined& refined : kRefined) {
    const CLI::Option* broad = sub.get_option_no_throw(refined.flag);
    const Setting* winner = broad ? find(*broad) : nullptr;
    if (!winner) continue;
    const int rank = winner->rank;
    for (const char* name : refined.by)
      std::erase_if(settings_, [&](const Setting& s) {
        return s.option == sub.get_option_no_throw(name) && s.rank < rank;
      });
  }
}

void Settings::explain(const std::string& error) const {
  for (const Setting& s : settings_) {
    if (s.rank == kFlag) continue;
    const std::string flag = long_names(*s.option).front();
    if (error.find(flag + ":") != std::string::npos || error.find(flag + " ") != std::string::npos)
      log(LogLevel::kError, flag + " was set by " + (s.rank == kVariable ? "the variable " : "") +
                                s.source + (s.rank == kVariable ? "=" + s.values[0] : ""));
  }
}

std::string Settings::show(const CLI::App& sub) const {
  std::ostringstream out;
  out << "# pagedkv " << sub.get_name() << "; configuration file: "
      << (path_.empty() ? "none (" + configuration_path() + " would be read)" : path_) << "\n["
      << sub.get_name() << "]\n";
  for (const CLI::Option* option : sub.get_options()) {
    const std::string group = option->get_group();
    if (!is_setting(*option) || group.empty()) continue;
    const Setting* setting = find(*option);
    std::vector<std::string> values = option->results();
    if (option->count() == 0) {
      values.clear();
      std::string value = option->get_default_str();
      if (value.starts_with('[') && value.ends_with(']'))  // of a list
        value = value.substr(1, value.size() - 2);
      if (!value.empty())
        values.push_back(value);
      else if (is_flag(*option))
        values.push_back("false");
    } else if (option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast) {
      values = {values.back()};
    } else if (!takes_many(*option)) {
      values = {joined(values, ",")};
    }
    std::string text;
    const bool secret = option->check_lname("api-key");
    for (const auto& value : values)
      text += (text.empty() ? "" : ", ") + as_toml(*option, secret ? "(not shown)" : value);
    if (takes_many(*option)) text = "[" + text + "]";
    const std::string line = option->get_lnames().front() + " = " + text;
    const std::string source = setting ? setting->source : "default";
    const bool unset = values.empty() && !takes_many(*option);
    out << (unset ? "# " : "") << line << std::string(line.size() < 40 ? 40 - line.size() : 1, ' ')
        << "# " << (unset ? "not set" : source) << '\n';
  }
  return out.str();
}

}  // namespace pagedkv::apps
