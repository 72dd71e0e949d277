#!/usr/bin/env python3
"""Tests check_includes.py on small trees made for the purpose."""

import pathlib
import tempfile
import unittest

import check_includes


class CheckIncludes(unittest.TestCase):
    def offenders(self, files):
        """Lays out {path: text} and returns what the checker finds, as (path, line) pairs."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return [(str(file), line) for file, line, _ in check_includes.offenders(root)]

    def test_own_layer_and_layers_to_the_left_are_allowed(self):
        self.assertEqual([], self.offenders({
            "include/pagedkv/base/error.h": "#include <string>\n",
            "src/core/pool.h": "",
            "src/core/pool.cpp": '#include "core/pool.h"\n#include "pool.h"\n#include "pagedkv/base/error.h"\n',
        }))

    def test_a_layer_to_the_right_is_refused_with_its_line(self):
        files = {"src/engine/step.h": "", "include/pagedkv/core/pool.h": ""}
        for include in ('"engine/step.h"', "<engine/step.h>", '"../engine/step.h"'):
            self.assertEqual([("src/core/pool.cpp", 3)],
                             self.offenders(files | {"src/core/pool.cpp": f"\n\n#  include {include}\n"}), include)
        self.assertEqual([("src/base/log.cpp", 1)],
                         self.offenders(files | {"src/base/log.cpp": '#include "pagedkv/core/pool.h"\n'}))

    def test_public_headers_see_public_and_standard_headers_alone(self):
        public = "include/pagedkv/core/pool.h"
        for include in ('"core/private.h"', "<unistd.h>", "<hwy/highway.h>", "<openssl/sha.h>", '"pagedkv/apps/run.h"'):
            self.assertEqual([(public, 1)], self.offenders({
                "src/core/private.h": "", "include/pagedkv/apps/run.h": "", public: f"#include {include}\n"}), include)
        self.assertEqual([], self.offenders({public: "#include <vector>\n", "src/core/x.cpp": ""}))

    def test_outside_headers_stay_in_their_home(self):
        for include, home, elsewhere in (
                ("<hwy/highway.h>", "src/kernels/cpu/a.cpp", "src/kernels/reference/a.cpp"),
                ('"ggml-cpu.h"', "src/models/ggml/a.cpp", "src/models/toy/a.cpp"),
                ('"chat.h"', "src/models/ggml/a.cpp", "src/engine/a.cpp"),
                ("<llama.h>", "src/models/ggml/a.cpp", "src/apps/a.cpp"),
                ("<CLI/CLI.hpp>", "src/apps/a.cpp", "src/engine/a.cpp"),
                ("<nlohmann/json.hpp>", "src/apps/a.cpp", "src/core/a.cpp")):
            text = f"#include {include}\n"
            self.assertEqual([], self.offenders({home: text}), include)
            self.assertEqual([(elsewhere, 1)], self.offenders({elsewhere: text}), include)

    def test_the_python_module_sees_public_headers_nanobind_and_its_own(self):
        files = {"src/core/private.h": "", "include/pagedkv/core/pool.h": "", "python/src/arrays.h": ""}
        allowed = '#include <nanobind/nanobind.h>\n#include "arrays.h"\n#include "pagedkv/core/pool.h"\n#include <vector>\n'
        self.assertEqual([], self.offenders(files | {"python/src/pool.cpp": allowed}))
        for include in ('"core/private.h"', "<CLI/CLI.hpp>", '"../../src/core/private.h"'):
            self.assertEqual([("python/src/pool.cpp", 1)],
                             self.offenders(files | {"python/src/pool.cpp": f"#include {include}\n"}), include)

    def test_an_unknown_header_and_a_folder_without_layer_are_offenders(self):
        self.assertEqual([("src/core/a.cpp", 1)], self.offenders({"src/core/a.cpp": '#include "gone.h"\n'}))
        self.assertEqual([("src/misc/a.cpp", 1)], self.offenders({"src/misc/a.cpp": ""}))

    def test_comments_and_system_headers_do_not_count(self):
        self.assertEqual([], self.offenders({
            "src/core/a.cpp": '/* \n#include "engine/step.h"\n*/\n// #include "x.h"\n#include <sys/mman.h>\n'}))

    def test_tests_may_include_anything(self):
        self.assertEqual([], self.offenders({"src/apps/run.h": "", "tests/base/a.cpp": '#include "apps/run.h"\n'}))


if __name__ == "__main__":
    unittest.main()
