"""Hook of mkdocs: links in notebooks, which name files as they do on a disk, lead to the pages that are made of these."""

import logging
import posixpath
import re
from typing import Any

_log = logging.getLogger("mkdocs.hooks.links")  # a warning below mkdocs fails a strict build
_LINK = re.compile(r'(href|src)="(?![a-z]+:|/|#)([^"#]+)(#[^"]*)?"')


def on_page_content(html: str, page: Any, files: Any, **kwargs: Any) -> str:
    """Rewrite what mkdocs itself rewrites in Markdown only, and warn of what leads to no file of the site."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(link: re.Match[str]) -> str:
        attribute, path, anchor = link.groups()
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, path)))
        if target is None:
            _log.warning("%s: %r leads to no page", page.file.src_uri, path)
            return link[0]
        return f'{attribute}="{target.url_relative_to(page.file)}{anchor or ""}"'

    return _LINK.sub(rewrite, html)
