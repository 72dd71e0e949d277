// Where the settings of a subcommand come from: its flags, else variables (PAGEDKV_...), else the configuration file, else
// their defaults.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace pagedkv::apps {

// --config and --print-config, which every subcommand has.
void add_configuration(CLI::App& sub);

class Settings {
 public:
  // Puts what variables and the file say of flags that are not given in front of the arguments, so that a bad value is an error
  // like any other. args[0] is the name of `sub`, a subcommand of `app`. Throws std::invalid_argument for a file that cannot be
  // read, a key that no flag has, a value that no flag can take.
  Settings(const CLI::App& app, const CLI::App& sub, std::vector<std::string>& args);

  // Logs what set the flag that an error names, where that was not the command line.
  void explain(const std::string& error) const;

  // --print-config: TOML with the source of each value. After parsing.
  std::string show(const CLI::App& sub) const;

 private:
  struct Setting {
    const CLI::Option* option;
    int rank;            // of its source, the higher wins
    std::string source;  // for people
    std::vector<std::string> values;
    bool in_section = false;  // of the file
  };

  static void check_values(const CLI::App& sub, const std::vector<std::string>& args);

  void take_flags(const CLI::App& sub, const std::vector<std::string>& args);
  void take_variables(const CLI::App& sub);
  void take_file(const CLI::App& app, const CLI::App& sub, const std::vector<std::string>& args);
  const Setting* find(const CLI::Option& option) const;
  void drop_overruled(const CLI::App& sub);

  std::string path_;  // of the file, if there is one
  std::vector<Setting> settings_;
};

// $XDG_CONFIG_HOME/pagedkv/config.toml, or under ~/.config.
std::string configuration_path();

}  // namespace pagedkv::apps
