"""An import-linter contract that lists what a package may import; everything else breaks it.

Import-linter's own contracts list what is forbidden, which a new dependency would slip past.
"""

import sys
from typing import Any

import grimp
from importlinter import Contract, ContractCheck, fields, output


class AllowedImportsContract(Contract):
    """Modules of `packages` import themselves, the standard library and `allowed`, and nothing else.

    With `forbidden_roots` the contract looks only at imports of those roots. A package that does not exist is left out.
    """

    type_name = "allowed_imports"

    # Any: the contract replaces each field by the parsed value.
    packages: Any = fields.SetField(subfield=fields.StringField())
    allowed: Any = fields.SetField(subfield=fields.StringField(), required=False, default=())
    forbidden_roots: Any = fields.SetField(subfield=fields.StringField(), required=False, default=())

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """Collects each direct import that is not on the list."""
        broken = []
        for package in sorted(self.packages):
            if package not in graph.modules:
                continue
            for importer in sorted({package} | graph.find_descendants(package)):
                for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                    if not self._may_import(package, imported):
                        details = graph.get_import_details(importer=importer, imported=imported)
                        broken.append((importer, imported, [detail["line_number"] for detail in details]))
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def _may_import(self, package: str, imported: str) -> bool:
        root = imported.partition(".")[0]
        if root in sys.stdlib_module_names or (self.forbidden_roots and root not in self.forbidden_roots):
            return True
        return any(f"{imported}.".startswith(f"{name}.") for name in {package, *self.allowed})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Prints one line for each import."""
        for importer, imported, lines in check.metadata["broken"]:
            output.print_error(f"{importer} may not import {imported} (line {', '.join(map(str, lines))})", bold=False)
        output.new_line()
