# SPDX-License-Identifier: Apache-2.0
"""Writes small documents of every kind that `index` reads, with the standard library alone."""

import io
import pathlib
import textwrap
import zipfile
import zlib

LINES_A_PAGE, COLUMNS = 44, 84


def pages_of(text: str, lines: int = LINES_A_PAGE, columns: int = COLUMNS) -> list[list[str]]:
    """The text typeset: paragraphs wrapped, a blank line between them, so many lines a page."""
    wrapped: list[str] = []
    for paragraph in filter(None, (p.strip() for p in text.split("\n\n"))):
        wrapped += [*textwrap.wrap(" ".join(paragraph.split()), columns), ""]
    pages, page = [], []
    for line in wrapped:
        if line or page:
            page.append(line)
        if len(page) == lines:
            pages, page = [*pages, page], []
    return [*pages, page] if page else pages


def hyphenated(text: str, columns: int) -> list[str]:
    """Lines whose last word is broken where it does not fit, as a typesetter does it."""
    lines, line = [], ""
    for word in text.split():
        room = columns - len(line) - 1
        if len(word) <= room:
            line = f"{line} {word}".strip()
        elif len(word) > 7 and room > 5:
            lines.append(f"{line} {word[:room - 1]}-".strip())
            line = word[room - 1:]
        else:
            lines.append(line)
            line = word
    return [*lines, line]


def pdf_string(text: str) -> bytes:
    return b"(" + text.encode("cp1252", "replace").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)") + b")"


def column(lines: list[str], x: int, y: int) -> list[bytes]:
    """Lines of 10 point from (x, y) downwards."""
    return [b"BT /F1 10 Tf 12 TL %d %d Td" % (x, y), *(pdf_string(line) + b" Tj T*" for line in lines), b"ET"]


def pdf_objects(contents: list[bytes], compress: bool = True) -> list[bytes]:
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>",
               b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(contents), b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(contents)))),
               b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"]
    for i, content in enumerate(contents):
        packed = zlib.compress(content) if compress else content
        objects += [b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> /Contents %d 0 R >>" % (5 + 2 * i),
                    b"<< /Length %d%s >>\nstream\n%s\nendstream" % (len(packed), b" /Filter /FlateDecode" if compress else b"", packed)]
    return objects


def pdf_file(objects: list[bytes], trailer: bytes = b"") -> bytes:
    out, offsets = b"%PDF-1.4\n", []
    for i, body in enumerate(objects):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (i + 1, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return out + b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1, table, len(objects) + 1, trailer, len(out))


def pdf(pages: list[list[str]], header: str = "", numbered: bool = False, headed_from: int = 1, footer: str = "") -> bytes:
    """One column a page, with a running header, a footer and page numbers if wanted."""
    contents = []
    for n, lines in enumerate(pages, 1):
        parts = column(lines, 72, 700)
        if header and n >= headed_from:
            parts += column([header], 72, 750)
        if footer:
            parts += column([footer], 72, 52)
        if numbered:
            parts += column([f"Page {n} of {len(pages)}"], 280, 40)
        contents.append(b"\n".join(parts))
    return pdf_file(pdf_objects(contents))


def two_columns(left: list[str], right: list[str], footnote: list[str]) -> bytes:
    return pdf_file(pdf_objects([b"\n".join([*column(left, 60, 720), *column(right, 330, 720), *column(footnote, 60, 80)])]))


def archive(entries: dict[str, str | bytes], first: str = "") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        if first:
            z.writestr(zipfile.ZipInfo("mimetype"), first)
        for name, data in entries.items():
            z.writestr(name, data)
    return out.getvalue()


def docx(body: str, **parts: str) -> bytes:
    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    files = {"[Content_Types].xml": '<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
             "word/document.xml": f'<?xml version="1.0" encoding="UTF-8"?><w:document {space}><w:body>{body}</w:body></w:document>'}
    for name, xml in parts.items():
        files[f"word/{name}.xml"] = f'<?xml version="1.0"?><w:{name} {space}>{xml}</w:{name}>'
    return archive(files)


def docx_paragraph(text: str, style: str = "", more: str = "") -> str:
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f'<w:p>{properties}<w:r>{more}<w:t xml:space="preserve">{text}</w:t></w:r></w:p>'


def odt(body: str, styles: str = "") -> bytes:
    spaces = " ".join(f'xmlns:{n}="urn:oasis:names:tc:opendocument:xmlns:{n}:1.0"' for n in ("office", "text", "table", "style"))
    files = {"content.xml": f'<?xml version="1.0" encoding="UTF-8"?><office:document-content {spaces}><office:body><office:text>{body}'
                            "</office:text></office:body></office:document-content>"}
    if styles:
        files["styles.xml"] = f'<?xml version="1.0" encoding="UTF-8"?><office:document-styles {spaces}><office:styles>{styles}</office:styles></office:document-styles>'
    return archive(files, "application/vnd.oasis.opendocument.text")


def epub(chapters: dict[str, str], spine: list[str] | None = None, extra: dict[str, bytes] | None = None) -> bytes:
    """Chapters by their file's name, each an XHTML body; the spine is their order."""
    items = "".join(f'<item id="{n}" href="text/{n}" media-type="application/xhtml+xml"/>' for n in chapters)
    refs = "".join(f'<itemref idref="{n}"/>' for n in (spine or list(chapters)))
    files: dict[str, str | bytes] = {
        "META-INF/container.xml": '<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
                                  '<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>',
        "OEBPS/book.opf": f'<?xml version="1.0"?><package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{refs}</spine></package>'}
    for name, body in chapters.items():
        files[f"OEBPS/text/{name}"] = ('<?xml version="1.0" encoding="UTF-8"?><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" '
                                       f'"http://www.w3.org/TR/xhtml11/DTD/xhtml11.dtd"><html xmlns="http://www.w3.org/1999/xhtml"><head><title>x</title></head><body>{body}</body></html>')
    return archive({**files, **(extra or {})}, "application/epub+zip")


def write(folder: pathlib.Path, name: str, data: bytes | str) -> pathlib.Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path
