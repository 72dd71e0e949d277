#!/bin/sh
# Prints the folder for what is downloaded or built once: llama.cpp's sources and libraries, models. The scripts and
# CMake both ask here, so that they agree. First that fits:
#   $PAGEDKV_CACHE_DIR, ${XDG_CACHE_HOME:-$HOME/.cache}/pagedkv if it can be written, build/cache in the repository.
set -u

absolute() { case $1 in /*) printf '%s\n' "$1" ;; *) printf '%s/%s\n' "$(pwd)" "$1" ;; esac; }
usable() { mkdir -p "$1" 2>/dev/null && [ -w "$1" ] && [ -x "$1" ]; }

if [ -n "${PAGEDKV_CACHE_DIR:-}" ]; then
  absolute "$PAGEDKV_CACHE_DIR"
  exit 0
fi
case ${XDG_CACHE_HOME:-} in
  /*) user_cache=$XDG_CACHE_HOME/pagedkv ;;
  *) user_cache=${HOME:+$HOME/.cache/pagedkv} ;;
esac
if [ -n "$user_cache" ] && usable "$user_cache"; then
  printf '%s\n' "$user_cache"
else
  printf '%s/build/cache\n' "$(cd "$(dirname "$0")/.." && pwd)"
fi
