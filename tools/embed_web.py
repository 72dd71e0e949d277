#!/usr/bin/env python3
"""Writes the C++ source that holds what the server shows of itself: its chat page and its OpenAPI document as JSON.

    tools/embed_web.py index.html openapi.yaml VERSION OUT.cpp

The page is one file with one <style> and one <script>; the policy that goes out with it allows these two by their
hashes, requests to the server itself, and nothing else. It must ask for nothing from outside.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys

try:
    import yaml
except ImportError:
    sys.exit("embed_web.py needs PyYAML: run scripts/setup.sh, or install python3-yaml")


def policy(page: str) -> str:
    def source(tag: str) -> str:
        bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        if len(bodies) != 1 or page.count(f"<{tag}") != 1:
            sys.exit(f"the page has not one <{tag}> without attributes")
        digest = hashlib.sha256(bodies[0].encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    if re.search(r"""(?:src|href|action)=["'](?!data:|#)""", page) or re.search(
        r"\son\w+=[\"']|\sstyle=[\"']", page
    ):
        sys.exit(
            "the page asks for something outside of itself, or has a script or style in an attribute"
        )
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {source('script')}",
            f"style-src {source('style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def literal(text: str) -> str:
    """A C string literal. Octal escapes, since hexadecimal ones have no end; "?" among them, for trigraphs."""

    def escaped(byte: int) -> str:
        if byte == 0x0A:
            return "\\n"
        plain = 0x20 <= byte < 0x7F and byte not in b'"\\?'
        return chr(byte) if plain else f"\\{byte:03o}"

    data = text.encode()
    return "\n".join(
        f'    "{"".join(map(escaped, data[at : at + 96]))}"' for at in range(0, len(data), 96)
    )


def main() -> None:
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    page_path, api_path, version, out_path = sys.argv[1:]
    with open(page_path, encoding="utf-8") as file:
        page = file.read()
    with open(api_path, encoding="utf-8") as file:
        api = yaml.safe_load(file)
    api["info"]["version"] = version
    constants = {
        "kChatPage": page,
        "kChatPagePolicy": policy(page),
        "kOpenApi": json.dumps(api, ensure_ascii=False, separators=(",", ":")),
    }
    with open(out_path, "w", encoding="utf-8") as out:
        out.write(
            '// Made by tools/embed_web.py.\n#include "server/web_content.h"\n\nnamespace pagedkv {\n\n'
        )
        for name, text in constants.items():
            out.write(
                f"const std::string_view {name}{{\n{literal(text)},\n    {len(text.encode())}}};\n\n"
            )
        out.write("}  // namespace pagedkv\n")


if __name__ == "__main__":
    main()
