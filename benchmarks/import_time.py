"""What `import hf_platonic` costs over `import peft`, which it needs in any case.

    python benchmarks/import_time.py [--json FILE]

Fresh processes, in turn; the figure is the median ratio. About a minute.
"""

from __future__ import annotations

import subprocess
import sys

from _figures import arguments, ratio, report


def main() -> None:
    options = arguments(__doc__).parse_args()

    def importing(name: str) -> None:
        subprocess.run([sys.executable, "-c", f"import {name}"], check=True)

    value = ratio(lambda: importing("hf_platonic"), lambda: importing("peft"), rounds=7)
    report({"import_hf_platonic_over_import_peft": value}, options.json)


if __name__ == "__main__":
    main()
