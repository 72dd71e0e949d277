// Numbers for names and seeds. Not secret.
#pragma once

#include <cstdint>
#include <string>

namespace pagedkv {

uint64_t random_bits();                              // any thread; keeps nothing in each
std::string random_name(const std::string& prefix);  // the prefix and 24 hexadecimal digits

}  // namespace pagedkv
