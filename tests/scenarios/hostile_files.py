# SPDX-License-Identifier: Apache-2.0
"""Files that somebody made to harm who reads them, or that no reader can read: what each is, and how `index` ends on it."""

import collections.abc
import dataclasses
import os
import pathlib
import random
import struct
import zlib

import documents

MB = 1 << 20


@dataclasses.dataclass
class Case:
    name: str
    make: collections.abc.Callable[[pathlib.Path], pathlib.Path]  # in this empty folder; what is to be indexed
    mentions: tuple[str, ...] = ()  # of the sentence that refuses it
    read: bool = False  # it can be read, and nothing but its own text is
    characters: int = 10_000  # of the text that is read, at most
    seconds: float = 20
    megabytes: int = 600


def file_of(data: bytes | str) -> collections.abc.Callable[[pathlib.Path], pathlib.Path]:
    return lambda folder: documents.write(folder, "hostile", data)


def made(build: collections.abc.Callable[[], bytes | str]) -> collections.abc.Callable[[pathlib.Path], pathlib.Path]:
    return lambda folder: documents.write(folder, "hostile", build())


def good_docx(**parts: str) -> bytes:
    return documents.docx(documents.docx_paragraph("The text of the letter."), **parts)


def odt_of(content: str) -> bytes:
    return documents.archive({"content.xml": content}, "application/vnd.oasis.opendocument.text")


def epub_of(container: str, **more: str) -> bytes:
    return documents.archive({"META-INF/container.xml": container, **more}, "application/epub+zip")


LAUGHS = '<!DOCTYPE x [<!ENTITY a "ha">' + "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9)) + "]>"
SECRET = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'


def archive_of_archives(levels: int = 6, copies: int = 16) -> bytes:
    """What 42.zip is: each level holds copies of the next, and the last zeros."""
    inner = documents.archive({"zeros": bytes(16 * MB)})
    for _ in range(levels):
        inner = documents.archive({f"{n}.zip": inner for n in range(copies)})
    return inner


def archive_of_the_same(names: collections.abc.Iterable[str], size: int) -> bytes:
    """A ZIP archive of entries of so many zeros, deflated once."""
    zeros = bytes(size)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(zeros) + packer.flush()
    common = struct.pack("<HHHHHIII", 20, 0, 8, 0, 0x21, zlib.crc32(zeros), len(packed), size)
    out, directory, at = [], [], 0
    for name in names:
        written = name.encode()
        local = b"PK\x03\x04" + common + struct.pack("<HH", len(written), 0) + written + packed
        directory.append(b"PK\x01\x02\x14\0" + common + struct.pack("<HHHHHII", len(written), 0, 0, 0, 0, 0, at) + written)
        out.append(local)
        at += len(local)
    listing, count = b"".join(directory), len(directory)
    few, size_of_listing = min(count, 0xFFFF), len(listing)
    if count > 0xFFFF:
        end = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(listing), at)
        listing += b"PK\x06\x06" + end + b"PK\x06\x07" + struct.pack("<IQI", 0, at + len(listing), 1)
    return b"".join(out) + listing + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, few, few, size_of_listing, at, 0)


BOOK_HERE = '<container><rootfiles><rootfile full-path="book.opf"/></rootfiles></container>'


def book_of(*names: str) -> str:
    items = "".join(f'<item id="i{n}" href="{n}" media-type="application/xhtml+xml"/>' for n in names)
    order = "".join(f'<itemref idref="i{n}"/>' for n in names)
    return f"<package><manifest>{items}</manifest><spine>{order}</spine></package>"


def one_chapter_for_all(times: int = 3000) -> bytes:
    """A book that names the same chapter of 100,000 elements again and again: 300 million elements from 3 kB."""
    order = book_of("a.xhtml").replace("</spine>", '<itemref idref="ia.xhtml"/>' * times + "</spine>")
    return epub_of(BOOK_HERE, **{"book.opf": order, "a.xhtml": "<html><body>" + "<i></i>" * 100_000 + "<p>Own text.</p></body></html>"})


def swelling_epub() -> bytes:
    """Chapters of 20 MiB behind a book that lists them."""
    names = [f"{n}.xhtml" for n in range(60)]
    small = epub_of(BOOK_HERE, **{"book.opf": book_of(*names)})
    big = archive_of_the_same(names, 20 * MB)
    return joined(small, big)


def joined(first: bytes, second: bytes) -> bytes:
    """One ZIP archive of the entries of two."""
    out = bytearray()
    directory = bytearray()
    count = 0
    for data in (first, second):
        end = data.rindex(b"PK\x05\x06")
        entries, size, begin = struct.unpack_from("<HII", data, end + 10)
        base = len(out)
        out += data[:begin]
        at = begin
        for _ in range(entries):
            name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
            length = 46 + name + extra + comment
            entry = bytearray(data[at : at + length])
            struct.pack_into("<I", entry, 42, struct.unpack_from("<I", entry, 42)[0] + base)
            directory += entry
            at += length
        count += entries
    return bytes(out + directory + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(out), 0))


def flipped_docx() -> bytes:
    data = bytearray(good_docx())
    at = data.index(b"word/document.xml") + 30
    data[at : at + 8] = b"\xff" * 8
    return bytes(data)


def locked_docx() -> bytes:
    """A ZIP archive that says of each entry that it is encrypted."""
    data = bytearray(good_docx())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(signature)
        while at >= 0:
            data[at + flags] |= 1
            at = data.find(signature, at + 4)
    return bytes(data)


def pdf_with(objects: dict[int, bytes], content: bytes = b"BT /F1 10 Tf (x) Tj ET", trailer: bytes = b"") -> bytes:
    """A PDF of one page, some of whose objects are others."""
    made_of = documents.pdf_objects([content])
    for number, body in objects.items():
        made_of += [b"null"] * (number - len(made_of))
        made_of[number - 1] = body
    return documents.pdf_file(made_of, trailer)


def stream(data: bytes, more: bytes) -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), more, data)


def twice_deflated() -> bytes:
    data = zlib.compress(zlib.compress(bytes(100 * MB)))
    return pdf_with({5: stream(data, b"/Filter [/FlateDecode /FlateDecode]")})


def words_without_end() -> bytes:
    """Two million words from 30 kB, a line below the other: all but those of the first lines lie off the page, where nobody reads."""
    return pdf_with({5: stream(zlib.compress(b"BT /F1 10 Tf 12 TL 72 700 Td " + b"(word) Tj T* " * 2_000_000 + b"ET"), b"/Filter /FlateDecode")})


def one_page_for_all(pages: int = 20_000) -> bytes:
    """Each page shows the same lines: 70 million words from 2 MB."""
    line = b"(" + b"word " * 50 + b") Tj T* "
    made_of = documents.pdf_objects([b"BT /F1 2 Tf 10 TL 20 780 Td " + line * 70 + b"ET"])
    page = made_of[3]
    made_of[1] = b"<< /Type /Pages /Count %d /Kids [4 0 R %s] >>" % (pages, b"".join(b"%d 0 R " % (len(made_of) + n) for n in range(1, pages)))
    return documents.pdf_file(made_of + [page] * (pages - 1))


def shared_pages(levels: int = 8) -> bytes:
    """A tree of pages in which each node has the same child ten times: 100 million pages in 2 kB."""
    tree = {2: b"<< /Type /Pages /Count %d /Kids [%s] >>" % (10**levels, b"10 0 R " * 10)}
    for level in range(levels):
        child = b"4 0 R " if level == levels - 1 else b"%d 0 R " % (11 + level)
        tree[10 + level] = b"<< /Type /Pages /Count %d /Kids [%s] >>" % (10 ** (levels - level - 1) or 1, child * 10)
    return pdf_with(tree)


def drawing_that_draws_itself() -> bytes:
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /XObject << /X 6 0 R >> >> /Contents 5 0 R >>"
    form = stream(b"/X Do /X Do /X Do", b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /X 6 0 R >> >>")
    return pdf_with({4: page, 6: form}, b"/X Do")


def tables_in_a_circle() -> bytes:
    data = documents.pdf([["One line."]])
    at = data.rindex(b"xref\n0")
    return data.replace(b"/Root 1 0 R", b"/Root 1 0 R /Prev %d" % at)


def locked_pdf() -> bytes:
    return documents.pdf_file(documents.pdf_objects([b"BT ET"]) + [b"<< /Filter /Standard /V 1 /R 2 /O (" + b"a" * 32 + b") /U (" + b"b" * 32 + b") /P -4 >>"],
                              b"/Encrypt 6 0 R /ID [(0123456789abcdef) (0123456789abcdef)]")


def sparse_file(folder: pathlib.Path) -> pathlib.Path:
    path = folder / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    return path


def pipe(folder: pathlib.Path) -> pathlib.Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def links(folder: pathlib.Path) -> pathlib.Path:
    documents.write(folder.parent, "secret.txt", "root: a secret\n")
    documents.write(folder, "in/own.txt", "Own text.\n")
    (folder / "in/out.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "in/passwd").symlink_to("/etc/passwd")
    (folder / "in/up").symlink_to("..")
    (folder / "in/circle").symlink_to("circle")
    return folder / "in"


def many_files(folder: pathlib.Path) -> pathlib.Path:
    for n in range(100_000):
        os.close(os.open(folder / f"{n}.txt", os.O_CREAT | os.O_WRONLY))
    return folder


def deep_folders(folder: pathlib.Path) -> pathlib.Path:
    """Deeper than a path may be long."""
    where = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deeper", dir_fd=where)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=where)
        os.close(where)
        where = inner
    os.close(where)
    documents.write(folder, "text.txt", "Own text.\n")
    return folder


def strange_names(folder: pathlib.Path) -> pathlib.Path:
    for name in (b"\x1b[2J\x1b]0;owned\x07.txt", b"two\nlines.txt", b"\xff\xfe.txt", b"-o.txt", b"$(touch owned).pdf"):
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(b"Own text.\n")
    return folder


CASES = (
    Case("DOCX: a paragraph of 60 MiB of blanks", made(lambda: documents.docx("<w:p>" + " " * (60 * MB))), ("XML",)),
    Case("EPUB: 60 chapters of 20 MiB of zeros", made(swelling_epub), ("unpacked",), megabytes=2600),
    Case("EPUB: the same chapter 3,000 times", made(one_chapter_for_all), read=True),
    Case("an archive of archives (42.zip): 250 TiB unpacked", made(archive_of_archives), ("ZIP archive",)),
    Case("an archive of 100,050 entries", made(lambda: archive_of_the_same(map(str, range(100_050)), 0)), ("entries",)),
    Case("ODT: a billion laughs (XML entities)", file_of(odt_of(LAUGHS + "<x>&j;</x>")), ("XML",)),
    Case("DOCX: a billion laughs", file_of(documents.archive({"[Content_Types].xml": "", "word/document.xml": LAUGHS + "<x>&j;</x>"})), ("XML",)),
    Case("ODT: an entity that is /etc/passwd", file_of(odt_of(SECRET + "<x>&a;</x>")), ("document type",)),
    Case("HTML: an entity that is /etc/passwd", file_of("<!DOCTYPE html [<!ENTITY a SYSTEM 'file:///etc/passwd'>]><html><body>&a; safe</body></html>"), read=True),
    Case("ODT: elements 100,000 deep", file_of(odt_of("<x>" * 100_000)), ("XML",)),
    Case("HTML: elements 300,000 deep", file_of("<html><body>" + "<div>" * 300_000), ("none in it",)),
    Case("EPUB: its book is ../../../etc/passwd", file_of(epub_of('<container><rootfile full-path="../../../etc/passwd"/></container>')), ("etc/passwd",)),
    Case("EPUB: its chapter is ../../../../etc/passwd", made(lambda: epub_of(BOOK_HERE, **{"book.opf": book_of("../../../../../../etc/passwd")})), ("none in it",)),
    Case("DOCX: its parts are called ../../word/…", file_of(documents.archive({"../../[Content_Types].xml": "", "../../word/document.xml": "<x/>"})), ("ZIP archive",)),
    Case("DOCX: cut in half", made(lambda: good_docx()[: len(good_docx()) // 2]), ("archive",)),
    Case("DOCX: flipped bits", made(flipped_docx), ("archive",)),
    Case("DOCX: encrypted", made(locked_docx), ("encrypted",)),
    Case("PDF: pages without text", file_of(documents.pdf([[""], [""]])), ("OCR", "2 pages")),
    Case("PDF: encrypted", made(locked_pdf), ("encrypted", "password")),
    Case("PDF: nothing behind its first line", file_of(b"%PDF-1.4\n"), ("pdftotext",)),
    Case("PDF: random bytes", made(lambda: b"%PDF-1.7\n" + random.Random(1).randbytes(50_000)), ("pdf",)),
    Case("PDF: pages that are their own parent", made(lambda: pdf_with({2: b"<< /Type /Pages /Count 1 /Kids [2 0 R] >>"})), ("PDF",)),
    Case("PDF: a billion pages, by its own account", made(lambda: pdf_with({2: b"<< /Type /Pages /Count 1000000000 /Kids [4 0 R] >>"})), ("PDF",), seconds=140, megabytes=2600),
    Case("PDF: 100 million pages in 2 kB", made(shared_pages), ("PDF",), seconds=140, megabytes=2600),
    Case("PDF: a table that names itself as the one before", made(tables_in_a_circle), read=True),
    Case("PDF: a drawing that draws itself", made(drawing_that_draws_itself), ("OCR",)),
    Case("PDF: 100 MiB, deflated twice", made(twice_deflated), ("pdf",), seconds=140, megabytes=2600),
    Case("PDF: two million words from 30 kB, most off the page", made(words_without_end), read=True, seconds=140, megabytes=2600),
    Case("PDF: 20,000 pages that share one of 3,500 words", made(one_page_for_all), ("PDF",), seconds=140, megabytes=2600),
    Case("a PNG image", file_of(b"\x89PNG\r\n\x1a\n" + bytes(100)), ("PNG", "OCR")),
    Case("a document of an old Office", file_of(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(100)), ("DOC",)),
    Case("a gzip file", file_of(b"\x1f\x8b\x08" + bytes(100)), ("gzip",)),
    Case("a program", file_of(b"\x7fELF" + bytes(100)), ("program",)),
    Case("a text with a zero byte", file_of(b"a" * 100 + b"\0"), ("binary",)),
    Case("a file of 1 TiB (sparse)", sparse_file, ("at most 1.0 GiB",)),
    Case("/dev/zero", lambda folder: pathlib.Path("/dev/zero"), ("/dev/zero",)),
    Case("a pipe into which nobody writes", pipe, ("pipe",)),
    Case("a text of 64 MiB without a blank", made(lambda: "a" * (64 * MB)), ("tokens",), seconds=60, megabytes=3000),
    Case("a folder with links out of it and in a circle", links, read=True),
    Case("a folder of 100,000 files", many_files, ("65536", "--include")),
    Case("folders 1,500 deep", deep_folders, read=True),
    Case("names with terminal codes, line breaks and wrong UTF-8", strange_names, read=True),
)
