# SPDX-License-Identifier: Apache-2.0
"""Documents as people have them: what is read of each kind, folders, growing texts, interrupted readings, sources."""

import io
import json
import pathlib
import shutil
import signal
import struct
import subprocess
import time
import unittest
import zipfile

import documents
import lode_file
import tiny_model
from program import INTERRUPTED, TEXT, ProgramTest, run, start


def keys_of(path: pathlib.Path) -> dict[str, bytes]:
    """Tokens, keys and values of an indexed text."""
    data = path.read_bytes()
    return {s.name: data[s.offset : s.offset + s.size] for s in lode_file.sections(data) if s.name == "tokens" or s.name.startswith("kv/")}


def text_of(path: pathlib.Path) -> str:
    data = path.read_bytes()
    return next(data[s.offset : s.offset + s.size] for s in lode_file.sections(data) if s.name == "text").decode()


def places_of(path: pathlib.Path) -> tuple[dict, list[tuple[int, int, int]]]:
    """What the file says of its sources, and (byte, page, line) of each stretch of the text."""
    data = path.read_bytes()
    found = {s.name: data[s.offset : s.offset + s.size] for s in lode_file.sections(data) if s.name in ("sources", "places")}
    return json.loads(found["sources"]), list(struct.iter_unpack("<qii", found["places"]))


def day_of(path: pathlib.Path) -> int:
    """What the chat template took for now, in seconds since 1970."""
    data = path.read_bytes()
    return next(json.loads(data[s.offset : s.offset + s.size])["time"] for s in lode_file.sections(data) if s.name == "attached/chat")


def part(i: int) -> str:
    return f"Part {i} tells of the harbour. " + "".join(f"In year {i}{n} the bell of tower {n * 7 % 13} rang {n} times. " for n in range(40)) + "\n"


class Growing(ProgramTest):
    def setUp(self):
        self.place = pathlib.Path(self.folder / self.id().rsplit(".", 1)[1])
        self.place.mkdir()

    def index_all(self, *arguments):
        return self.assert_done(run("index", "-m", self.model, "--json", "--quiet", *arguments)).json()

    def test_ten_appends_equal_one_reading(self):
        files = [documents.write(self.place, f"p{i}.txt", part(i)) for i in range(11)]
        named = [word for file in files for word in ("-f", file)]
        one = self.index_all(*named, "-o", self.place / "one.lode", "-a", "kmeans")
        whole = documents.write(self.place, "whole.txt", "".join(part(i) for i in range(11)))
        self.index_all("-f", whole, "-o", self.place / "whole.lode")
        grown = self.place / "grown.lode"
        self.index_all("-f", files[0], "-o", grown, "-a", "kmeans")
        for file in files[1:]:
            result = self.assert_done(run("index", "--append", grown, "-f", file, "--json", "--quiet")).json()
            self.assertLess(result["tokens_read"], one["tokens"] // 11 + 600)
        self.assertEqual(keys_of(grown), keys_of(self.place / "one.lode"))
        self.assertEqual(keys_of(grown), keys_of(self.place / "whole.lode"))
        self.assertEqual([f["path"] for f in result["files"]], list(map(str, files)))
        self.assert_done(run("ask", grown, "Who rang?", "-n", "4", "--show-sources"))
        self.assert_done(run("verify", grown))

    def test_a_file_that_is_appended_again_is_named(self):
        first, second = (documents.write(self.place, f"again{i}.txt", part(i)) for i in range(2))
        grown = self.place / "again.lode"
        self.index_all("-f", first, "-o", grown)
        new = self.assert_done(run("index", "--append", grown, "-f", second))
        self.assertNotIn("twice", new.err)
        again = self.assert_done(run("index", "--append", grown, "-f", first, "-f", second))
        self.assertIn("again0.txt and 1 more are there already and will be there twice", again.err)

    def test_another_model_appends_nothing(self):
        other = self.place / "model"
        tiny_model.write(other, seed=9)
        file, grown = documents.write(self.place, "p.txt", part(0)), self.place / "grown.lode"
        self.index_all("-f", file, "-o", grown)
        before = grown.read_bytes()
        result = run("index", "--append", grown, "-m", other, "-f", file)
        self.assert_refused(result, f"{grown}: --append: expected the model that read it", "leave -m out")
        self.assertEqual(grown.read_bytes(), before)

    def test_what_cannot_be_appended_is_one_sentence(self):
        """Of a text that is too long, or a method that cannot be had, not of the file that is added to."""
        file, grown = documents.write(self.place, "p.txt", part(0)), self.place / "grown.lode"
        short = self.place / "model"
        shutil.copytree(self.model, short)
        config = json.loads((short / "config.json").read_text(encoding="utf-8"))
        (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}), encoding="utf-8")
        self.assert_done(run("index", "-m", short, "-f", file, "-o", grown, "-a", "full"))
        before = grown.read_bytes()
        long = documents.write(self.place, "long.txt", part(1) * 8)
        result = self.assert_refused(run("index", "--append", grown, "-f", long), f"{grown}: --append: expected at most the 8192 tokens", "`ask` takes several")
        self.assertNotIn("--rope-factor", result.err)
        self.assert_refused(run("index", "--append", grown, "-f", file, "-a", "hash"), "hash", "weights=FILE")
        self.assert_refused(run("index", "-m", short, "-f", file, "-o", self.place / "x.lode", "-c", "100"), "--ctx-size: expected room for the text's", "found 100")
        self.assertEqual(grown.read_bytes(), before)

    def test_white_space_alone_is_no_text(self):
        file = documents.write(self.place, "blank.txt", " \n\n")
        self.assert_refused(run("index", "-m", self.model, "-f", file, "-o", self.place / "x.lode"), "found white space alone")

    def test_a_folder_is_read_again_from_the_first_change_on(self):
        folder = self.place / "notes"
        for i in range(6):
            documents.write(folder, f"n{i}.md", part(i))
        output = self.place / "notes.lode"
        first = self.index_all("-f", folder, "-o", output)
        self.assertEqual(first["tokens_kept"], 0)
        again = self.index_all("-f", folder, "-o", output)
        self.assertEqual(again["tokens_read"], 0)
        (folder / "n3.md").write_text(part(30), encoding="utf-8")
        result = run("index", "-m", self.model, "-f", folder, "-o", output)
        self.assert_done(result)
        self.assertRegex(result.err, r"tokens are kept from before; reading goes on from notes/n[24]\.md")
        shutil.copy(output, self.place / "copy.lode")
        again = self.index_all("-f", folder, "-o", self.place / "copy.lode", "--restart")
        self.assertEqual(again["tokens_kept"], 0)
        # What has changed came last, and stays there: its next change costs only itself.
        (folder / "n3.md").write_text(part(31), encoding="utf-8")
        result = self.index_all("-f", folder, "-o", output)
        self.assertLess(result["tokens_read"], first["tokens"] // 6 + 600)
        self.assertEqual(result["files"][-1]["path"], "notes/n3.md")

    def test_an_interrupted_reading_goes_on(self):
        text = documents.write(self.place, "long.txt", TEXT * 700)
        output, log = self.place / "long.lode", self.place / ".long.lode.partial"
        for sent, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, INTERRUPTED)):
            process = start("index", "-m", self.model, "-f", text, "-o", output, "--quiet")
            before = log.stat().st_size if log.exists() else 0
            while process.poll() is None and (not log.exists() or log.stat().st_size <= before + (2 << 20)):  # a whole block
                time.sleep(0.01)
            self.assertIsNone(process.poll(), "finished before it could be interrupted")
            process.send_signal(sent)
            process.communicate()
            self.assertEqual(process.returncode, code)
            self.assertFalse(output.exists())
        self.assertEqual(log.stat().st_mode & 0o777, 0o600, "keys and values are no other user's business")
        kept = log.read_bytes()
        other = documents.write(self.place, "other.txt", "Another text. " * 50)
        self.assert_refused(run("index", "-m", self.model, "-f", other, "-o", output), "found one of another text, model or setting")
        self.assertEqual(log.read_bytes(), kept)
        with log.open("r+b") as half:  # the last block was not whole
            half.truncate(log.stat().st_size - 100)
        result = self.assert_done(run("index", "-m", self.model, "-f", text, "-o", output))
        self.assertRegex(result.err, r"going on after \d+ tokens that an interrupted reading left")
        self.assertFalse(log.exists())
        self.index_all("-f", text, "-o", self.place / "once.lode")
        self.assertEqual(keys_of(output), keys_of(self.place / "once.lode"))

    def test_an_interrupted_reading_keeps_the_day_that_its_chat_template_says(self):
        dated = self.place / "dated"
        shutil.copytree(self.model, dated)
        template = "{{ strftime_now('%H:%M:%S') }}{% for m in messages %}{{ m.content }}{% endfor %}"
        (dated / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
        text = documents.write(self.place, "dated.txt", TEXT * 700)
        output, log = self.place / "dated.lode", self.place / ".dated.lode.partial"
        command = ("index", "-m", dated, "-f", text, "-o", output, "-a", "full")
        process = start(*command, "--quiet")
        while process.poll() is None and not log.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate()
        self.assertEqual(process.returncode, INTERRUPTED)
        time.sleep(1)  # the time is another one now
        with start(*command) as process:
            said = [process.stderr.readline() for _ in range(3)]
            process.kill()
        self.assertTrue(any(line.startswith("going on after") for line in said), said)
        other = documents.write(self.place, "other.txt", "A third text. " * 50)
        for replaced in (log, output):  # an interrupted reading, and then a file, of another text each
            self.assertTrue(replaced.exists())
            time.sleep(1)
            began = int(time.time())
            self.assert_done(run("index", "-m", dated, "-f", other, "-o", output, "-a", "full", "--force", "--quiet"))
            self.assertGreaterEqual(day_of(output), began)
            other = documents.write(self.place, "last.txt", "And a fourth one. " * 200)
        began = day_of(output)
        longer = documents.write(self.place, "last.txt", "And a fourth one. " * 220)
        self.assert_done(run("index", "-m", dated, "-f", longer, "-o", output, "-a", "full", "--force", "--quiet"))
        self.assertEqual(day_of(output), began, "what is kept of a text says its day")
        time.sleep(1)
        self.assert_done(run("index", "-m", dated, "-f", longer, "-o", output, "-a", "full", "--kv-type", "f32", "--force", "--quiet"))
        self.assertGreater(day_of(output), began, "keys of another type are all read anew, on another day")


class Kinds(ProgramTest):
    """Text, order, pages and lines of each kind; the names say nothing."""

    def read(self, data: bytes | str, *arguments, name: str = "some.file") -> str:
        path = documents.write(self.folder, name, data)
        self.output = self.folder / "read.lode"
        self.result = self.assert_done(run("index", "-m", self.model, "-f", path, "-o", self.output, "--force", "--restart", *arguments))
        return text_of(self.output)

    def place(self, piece: str) -> tuple[int, int]:
        """Page and line at which a piece of the text begins."""
        text = text_of(self.output)
        at = len(text[: text.index(piece)].encode())
        _, marks = places_of(self.output)
        byte, page, line = [mark for mark in marks if mark[0] <= at][-1]
        return page, line + text.encode()[byte:at].count(b"\n")

    def test_plain_text_in_any_encoding(self):
        text = "Größe, Maß und Höhe: für alle Fälle schön aufgeschrieben.\nZwölf Boxkämpfer jagen Viktor quer über den großen Deich.\n"
        self.assertEqual(self.read(text), text)
        self.assertEqual(self.place("Zwölf"), (0, 2))
        self.assertEqual(self.read(b"\xef\xbb\xbf" + text.encode()), text)
        for encoding in ("utf-16", "utf-16-be", "utf-16-le", "utf-32", "latin-1", "cp1252"):
            with self.subTest(encoding):
                self.assertEqual(self.read(text.encode(encoding)), text)
                self.assertIn("read as", self.result.err)
        russian = "Съешь же ещё этих мягких французских булок, да выпей чаю. " * 3
        self.assertEqual(self.read(russian.encode("koi8-r")), russian)
        self.assertEqual(self.read(russian.encode("cp1251")), russian)

    def test_source_code_markdown_and_tables_stay_as_they_are(self):
        for text in ("def f(x):\n\treturn '<html>' + x  # PK\n", "# Title\n\n- *one*\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n",
                     "name;born\r\nAnn;1801\r\n\"Bob; the elder\";1799\r\n", "On %PDF-1.4 and <!DOCTYPE html>: a text about formats.\n"):
            self.assertEqual(self.read(text, name="x.pdf"), text)

    def test_pdf(self):
        def story(name):
            return f"The widow {name} lit the lamp of the harbour at noon, and {name}'s extraordinarily long correspondence was forgotten. " * 4

        names = {"First": "Ann", "Second": "Elizabeth", "Third": "Jo", "Fourth": "Marguerite"}
        pages = [documents.hyphenated(f"{number} chapter. {story(name)}", 60) for number, name in names.items()]
        text = self.read(documents.pdf(pages, "The Annals of the Harbour", numbered=True), name="annals.txt")
        self.assertEqual(text.count("The Annals of the Harbour"), 1, "a running header stands once")
        self.assertNotIn("Page 2", text)
        for name in names.values():
            self.assertIn(story(name).strip(), text, "lines and broken words are joined")
        self.assertEqual(self.place("Second chapter")[0], 2)
        self.assertEqual(self.place("Fourth chapter")[0], 4)
        sources, _ = places_of(self.output)
        self.assertEqual([(f["kind"], f["pages"]) for f in sources["files"]], [("pdf", 4)])

    def test_headers_and_footers_part_no_sentence_of_a_pdf(self):
        sentences = [f"In the year {1500 + n} the extraordinarily deaf keeper of lamp {n} counted {n * n} herring boats on the water." for n in range(90)]
        lines = documents.hyphenated(" ".join(sentences), 70)
        pages = [lines[i : i + 24] for i in range(0, len(lines), 24)]
        over = [page[-1] for page in pages[:-1] if not page[-1].endswith(".")]
        self.assertGreater(len(over), 3, "sentences that go over to the next page")
        for headed_from in (1, 2):
            with self.subTest(headed_from=headed_from):
                header, footer = "The Annals of the Harbour", "Printed for the town"
                text = self.read(documents.pdf(pages, header, True, headed_from, footer))
                flat = " ".join(text.split())
                for sentence in sentences:
                    self.assertIn(sentence, flat)
                self.assertEqual([flat.count(line) for line in (header, footer, "Page ")], [1, 1, 0])
                self.assertEqual(self.place(footer), (1, 28 if headed_from == 1 else 26))
                self.assertEqual(self.place(header), (headed_from, 1))
                for n, page in enumerate(pages, 1):
                    self.assertEqual(self.place(page[9])[0], n)

    def test_pdf_with_two_columns_and_a_footnote(self):
        left = documents.hyphenated("The left column tells of the lamp and of the widow who lit it every evening for years. " * 3, 42)
        right = documents.hyphenated("The right column tells of the ship that came in at noon when nobody was at the quay. " * 3, 42)
        text = self.read(documents.two_columns(left, right, ["1 See the annals of the harbour."]))
        self.assertLess(text.index("The left column"), text.index("The right column"))
        self.assertNotIn("lamp The right", text)
        self.assertIn("the widow who lit it every evening", text)
        self.assertIn("1 See the annals", text)

    def test_html(self):
        text = self.read('<!-- x --><!DOCTYPE html><html><head><title>T &eacute;</title><style>p{}</style><script>bad()</script></head>\n<body>\n'
                         "<h1>Hello</h1>\n\n<p>Some <b>bold</b>\n text&nbsp;&amp; more.</p><ul><li>one<li>two</ul><table><tr><th>a<td>b</tr></table>"
                         "<pre>x\n  y</pre><p>last</body></html>")
        self.assertEqual(text, "# T é\n\n# Hello\n\nSome bold text\u00a0& more.\n\n- one\n- two\n\na | b\n\nx\n  y\n\nlast\n")
        self.assertEqual(self.place("# Hello"), (0, 3))
        self.assertEqual(self.place("Some bold"), (0, 5))
        self.assertEqual(self.read("<html><body>\n\n\n\n<p>First</p>\n\n\n\n<p>Second</p></body></html>"), "First\n\nSecond\n")
        self.assertEqual([self.place("First"), self.place("Second")], [(0, 5), (0, 9)], "lines of the file, not of the text")
        same = "<html><head><title>The\n lamp</title></head><body><svg><h1>x</h1></svg><div><h1>The <b>lamp</b></h1></div><p>It burns.</body></html>"
        self.assertEqual(self.read(same), "# The lamp\n\nIt burns.\n")
        self.assertEqual(self.read(same.replace("The <b>", "A <b>")), "# The lamp\n\n# A lamp\n\nIt burns.\n")
        page = '<html><head><meta charset="iso-8859-1"></head><body>Größe</body></html>'
        self.assertEqual(self.read(page.encode("latin-1")), "Größe\n")
        self.assertEqual(self.read("<html><body>Größe, Maß und Höhe für alle Fälle</body></html>".encode("latin-1")), "Größe, Maß und Höhe für alle Fälle\n")

    def test_numbers_of_lists_in_html(self):
        def page(body):
            return f"<html><body>{body}</body></html>"

        self.assertEqual(self.read(page("<ol><li>one<li>two<ol type=a><li>x<ul><li>deep</ul><li>y</ol><li>three</ol>")),
                         "1. one\n2. two\n  a. x\n    - deep\n  b. y\n3. three\n")
        self.assertEqual(self.read(page("<ol start=9 type=I><li>nine<li value=14>fourteen<li>next</ol><ol type=A start=26><li>z<li>aa</ol>")),
                         "IX. nine\nXIV. fourteen\nXV. next\n\nZ. z\nAA. aa\n")
        self.assertEqual(self.read(page("<ol reversed><li>three<li>two<li>one</ol><ol style='list-style: none'><li>none</ol><ol><li><ol type=i><li>both</ol></ol>")),
                         "3. three\n2. two\n1. one\n\n- none\n\n1. i. both\n")
        self.assertEqual(self.read(page("<ol start=x><li value=99999999999><h2>Head</h2>text</ol>")), "1. ## Head\n\ntext\n")
        self.assertEqual(self.read(page("<ol><li><li>two<li></ol><ul><li></ul><p>Behind empty items.")), "2. two\n\nBehind empty items.\n")

    def test_numbers_of_notes_in_html(self):
        def page(body):
            return f"<html><body>{body}</body></html>"

        pandoc = ('<p>It burnt.<a href="#fn1" class="footnote-ref" id="fnref1" role="doc-noteref"><sup>1</sup></a> It sank.<a href="#fn2" role="doc-noteref">2</a></p>'
                  '<ol start=7><li id="fn1"><p>In May.<a href="#fnref1" role="doc-backlink">b</a></p></li><li id="fn2"><p>In June.</p></li></ol>')
        self.assertEqual(self.read(page(pandoc)), "It burnt.[1] It sank.[2]\n\n[1] In May.b\n\n[2] In June.\n")
        raised = ('<p id="p5">It burnt<sup><a href="#n1">[a]</a></sup> and sank<sup class="x"><span><a id="r" href="#n2">*</a></span></sup>.</p>'
                  '<p><a id="n1"></a><sup><a href="#r0">a</a></sup> In May.</p><p id="n2">* In June. <sup><a href="#r">\u2191</a></sup></p><p>10<sup>6</sup> on the 19<sup>th</sup></p>')
        self.assertEqual(self.read('<html><head><meta charset="utf-8"></head><body>' + raised), "It burnt[a] and sank[*].\n\n[a] In May.\n\n* In June. \u2191\n\n10^6 on the 19th\n")
        self.assertEqual(self.read(page("<p>It burnt.<sup>1</sup><p><sup>1</sup>In May.")), "It burnt.^1\n\n[1] In May.\n")

    def test_links_that_are_no_notes_in_html(self):
        def page(body):
            return f'<html><head><meta charset="utf-8"></head><body>{body}</body></html>'

        note = "It burnt[1] here.\n\n[1] In May.\n"
        for anchor in ("id", "name"):
            for number in ('<sup><a href="#{}">1</a></sup>', '<a href="#{}"><sup>1</sup></a>'):
                self.assertEqual(self.read(page(f'<p>It <a {anchor}="r"></a>burnt{number.format("n")} here.</p><p><a {anchor}="n"></a>{number.format("r")} In May.</p>')), note)
        self.assertEqual(self.read(page('<p>It burnt<sup><a href="#n">1</a></sup> <a id="n"></a>here<a href="#t"><sup>2</sup></a>.</p><p id="t">In May.</p>')),
                         "It burnt[1] here[2].\n\n[2] In May.\n")
        self.assertEqual(self.read(page('<p>On the 19<a href="#x"><sup>th</sup></a> and 3<sup><a href="#x">rd</a></sup></p><h2 id="x">Five</h2>')), "On the 19th and 3rd\n\n## Five\n")
        back = '<span>\u2191 <sup><a href="#r0">a</a></sup> <sup><a href="#r1">b</a></sup></span>'
        self.assertEqual(self.read(page(f'<p>A<sup id="r0"><a href="#n">[1]</a></sup>, B.<sup id="r1"><a href="#n"><span>[</span>1<span>]</span></a></sup></p><ol><li id="n">{back} In May.</ol>')),
                         "A[1], B.[1]\n\n[1] \u2191 a b In May.\n")
        self.assertEqual(self.read(page(f'<p>A<sup><a href="#n">1</a></sup></p><p id="n">{back} In May.')), "A[1]\n\n[1] \u2191 a b In May.\n")
        labels = ("12a", "b", "cc", "iv", "*", "\u2020\u2020", "\u00b9", "\u03b1", "\u6ce81", "note 1", "n5")
        marks = "".join(f'A<sup><a href="#gone{n}">{label}</a></sup> ' for n, label in enumerate(labels))
        self.assertEqual(self.read(page(f"<p>{marks}</p>")), " ".join(f"A[{label}]" for label in labels) + "\n")
        words = ("th", "top", "2 of 3", "1st", "\u044b\u0439")
        marks = "".join(f'A<sup><a href="#gone{n}">{word}</a></sup> ' for n, word in enumerate(words))
        self.assertEqual(self.read(page(f"<p>{marks}</p>")), " ".join(f"A{word}" for word in words) + "\n")
        self.assertEqual(self.read(page("<table><tr><td><sup>1</sup>H<td><sup>13</sup>C<tr><td><a href='#n'><sup>2</sup></a>x</table><table><tr><td id=n><sup>2</sup>In May.</table>")),
                         "1H | 13C\n[2]x\n\n[2] In May.\n")

    def test_cells_of_html_tables_stand_in_their_columns(self):
        def table(rows):
            return self.read(f"<html><body><table>{rows}</table></body></html>")

        self.assertEqual(table("<tr><th rowspan=2>Region<th colspan=2>2024<tr><th>Q1<th>Q2<tr><td rowspan=2>North<td>100<td>200<tr><td colspan=2>500 both"),
                         "Region | 2024\n| Q1 | Q2\nNorth | 100 | 200\n| 500 both\n")
        self.assertEqual(table("<tr><td><td colspan=2>2024<td>2025<tr><td>North<td>1<td>2<td>3"), "| 2024 | | 2025\nNorth | 1 | 2 | 3\n")
        self.assertEqual(table("<tr><td rowspan=3>a<td rowspan=2 colspan=2>b<td>c<tr><td>d<tr><td>e<td>f<td>g<tr><td>h"), "a | b | | c\n| | | d\n| e | f | g\nh\n")
        self.assertEqual(table("<tr><td rowspan=0>a<td rowspan=70000>b<td>c" + "<tr><td>d" * 3), "a | b | c\n" + "| | d\n" * 3)
        self.assertEqual(table("<thead><tr><td rowspan=9>a<td rowspan=0>b<td>c</thead><tbody><tr><td>d<td>e</tbody>"), "a | b | c\nd | e\n")
        # A cell that two others cover, hidden rows and cells, paragraphs and notes in cells.
        self.assertEqual(table("<tr><td>a<td rowspan=2>b<tr><td colspan=2>c<td>d<tr><td>e<td>f"), "a | b\nc | | d\ne | f\n")
        self.assertEqual(table("<tr><td rowspan=2>a<td hidden colspan=5>x<td>b<tr hidden><td>y<tr><td>c"), "a | b\n| c\n")
        self.assertEqual(table("<tr><td rowspan=2><p>a</p><td><p>b</p><tr><td><p>c</p>"), "a | b\n| c\n")
        # Tables in cells have columns of their own, and leave those around them theirs.
        self.assertEqual(table("<tr><td rowspan=2>a<td>b<tr><td><table><tr><td>c<td>d<tr><td>e</table><tr><td>f<td>g"), "a | b\n\nc | d\ne\n\nf | g\n")
        self.assertEqual(table("<tr><td>a<td><table><tr><td colspan=2>b<td>c</table><tr><td><td>d"), "a |\n\nb | | c\n\n| d\n")
        # No spans: what says 1, and nonsense; cells without a table.
        self.assertEqual(table("<tr><td colspan=1 rowspan=1><td colspan=-3>b<td colspan=0>c<td colspan=x>d<td rowspan=-1>e<tr><td>f"), "| b | c | d | e\nf\n")
        self.assertEqual(self.read("<html><body><div><td colspan=3>a<td>b</div><tr rowspan=2><td>c</body></html>"), self.read("<html><body><div><td>a<td>b</div><tr><td>c</body></html>"))

    def test_short_rows_of_html_tables_stand_in_one_line(self):
        """As LibreOffice and Word write them: a paragraph in each cell. Pages that are laid out in tables keep their paragraphs."""
        def table(rows):
            return self.read(f"<html><body><table>{rows}</table></body></html>")

        self.assertEqual(table("<tr>\n <td>\n  <p>Region</p>\n </td>\n <td><p><b>Q1</b></p></td><tr><td><p>North</p><td><p>100</p><p>more</p>"), "Region | Q1\nNorth | 100 more\n")
        self.assertEqual(table("<tr><td><p></p><th>Q1<th>Q2<tr><td>North<td>1<br>x<td>2"), "| Q1 | Q2\nNorth | 1 x | 2\n")
        self.assertEqual(table("<tr><td><div>a</div><td><ul><li>b<li>c</ul>"), "a\n\n- b\n- c\n")
        self.assertEqual(table("<tr><td>a<table><tr><td><p>b</p><td><p>c</p><tr><td>d<td><td>e</table><td><p>f</p>"), "a\n\nb | c\nd | | e\n\nf\n")
        # An element that is left open takes the rows behind it in; one cell, and lines of a poem; empty rows; notes.
        self.assertEqual(table("<tr><td><div>a<td>b<tr><td><center>c<td>d<tr><td><b>e<td>f"), "a | b\nc | d\ne | f\n")
        self.assertEqual(table("<tr><td>one<br>two<p>three</p><tr><td colspan=2><p>a</p><p>b</p>"), "one\ntwo\n\nthree\n\na\n\nb\n")
        self.assertEqual(table("<tr><td>1<br>2<br>3<br>4<td>a<br>b"), "1\n2\n3\n4 | a\nb\n")
        self.assertEqual(table("<tr><td>a<td>b<tr><td><td> <td><p></p><tr><td><img alt=''><td><tr><td>c<td>d"), "a | b\nc | d\n")
        self.assertEqual(table("<tr><td rowspan=2>nav<td><h1>A</h1><tr><td><h2>B</h2><p>c"), "nav |\n\n# A\n\n## B\n\nc\n")
        self.assertEqual(table("<thead><tr><th rowspan=2>a<th>b</thead><tr><td>1<td>2"), "a | b\n1 | 2\n")
        self.assertEqual(self.read("<html><body><p>A<a href='#n'><sup>1</sup></a></p><table><tr id=n><td></td><td>1</td><td>In May.</table>"), "A[1]\n\n| 1 | In May.\n")
        long = "word " * 300
        self.assertEqual(table(f"<tr><td><td>{long}<tr><td>a<td>b"), f"| {long.strip()}\na | b\n")
        self.assertEqual(table(f"<tr><td><td><p>{long}</p><p>b</p><td><p>c</p><tr><td><p>d</p><td><p>e</p>"), f"{long.strip()}\n\nb\n\nc\n\nd | e\n")

    def test_spans_of_html_tables_have_bounds(self):
        self.assertEqual(self.read("<html><body><table><tr><td colspan=5000>a<td>b<tr><td colspan=100>c"), "a |" + " |" * 255 + " b\nc\n")
        for rows in ("<tr><td colspan=1000>a<td>b" * 3000, "<tr><td rowspan=0 colspan=1000>a" + "<tr><td>b" * 5000,
                     "<tr><td rowspan=65534>a<table>" * 40 + "<tr><td colspan=255>b<td>c" * 2000):
            text = self.read(f"<html><body><table>{rows}</table></body></html>")
            self.assertLess(len(text), 8 * len(rows))
            self.assertEqual(text.count("b"), rows.count("b") - rows.count("table"))

    def test_what_html_hides_is_not_read(self):
        hidden = ("<p hidden>A</p><p style='color: red; DISPLAY : None !important'>B</p><span style='visibility:hidden'>C</span><template><p>D<div>E</div></template>"
                  "<dialog>F</dialog><ol><li hidden>G<li>one</ol><h1 hidden>The lamp</h1>")
        shown = "<p style='display:none;display:block'>It burns.</p><dialog open>It smokes.</dialog>"
        self.assertEqual(self.read(f"<html><head><title>The lamp</title></head><body style='visibility:hidden'>{hidden}{shown}</body></html>"),
                         "# The lamp\n\n1. one\n\nIt burns.\n\nIt smokes.\n")
        notes = '<p id="n1" hidden>In May.</p><aside epub:type="footnote" style="display:none">In June.</aside><div role="doc-endnotes" hidden>In July.</div><p id="n2" hidden>No.</p>'
        self.assertEqual(self.read(f'<html><body><p>It burnt<sup><a href="#n1">1</a></sup>.</p>{notes}</body></html>'), "It burnt[1].\n\n[1] In May.\n\nIn June.\n\nIn July.\n")

    def test_what_folds_away_in_html_stands_in_lines_of_its_own(self):
        page = ("<body><details><summary>What is the price?</summary>It costs 40 pounds.</details><fieldset><legend>Address</legend>Harbour Street</fieldset>"
                "<video>No video here.</video></body>")
        self.assertEqual(self.read(f"<html>{page}</html>"), "What is the price?\nIt costs 40 pounds.\n\nAddress\nHarbour Street\n")

    def test_notes_of_an_epub(self):
        book = documents.epub({"a.xhtml": '<p>It burnt<a epub:type="noteref" href="notes.xhtml#n1">1</a>, it sank<a epub:type="noteref" href="../text/notes.xhtml#n2">2</a>.'
                                          '</p><aside epub:type="footnote" id="n1"><p>No note of these.</p></aside>',
                               "notes.xhtml": '<aside epub:type="footnote" id="n1"><p>In May.</p></aside><aside epub:type="footnote" id="n2"><p>In June.</p></aside>',
                               "answers.xhtml": "<p>Beside.</p>"},
                              ["a.xhtml", 'notes.xhtml" linear="no', 'answers.xhtml" linear="no'])
        self.assertEqual(self.read(book), "It burnt[1], it sank[2].\n\nNo note of these.\n\n[1] In May.\n\n[2] In June.\n")

    def test_epub(self):
        book = documents.epub({"b.xhtml": "<h1>Two</h1><p>Second &amp; last.</p>", "a.xhtml": "<h1>One</h1><p>First<br/>line.</p><img src='i.png' alt='a lamp'/>"},
                              ["a.xhtml", "b.xhtml"], {"OEBPS/i.png": b"\x89PNG\r\n\x1a\n" + bytes(5000)})
        self.assertEqual(self.read(book), "# One\n\nFirst\nline.\n\n[a lamp]\n\n# Two\n\nSecond & last.\n")

    def test_a_page_of_an_epub_stands_once(self):
        pages = {"a.xhtml": "<p>One.</p>", "b.xhtml": "<p>Two.</p>"}
        self.assertEqual(self.read(documents.epub(pages, ["a.xhtml", "b.xhtml", "a.xhtml", 'b.xhtml" linear="no'])), "One.\n\nTwo.\n")

    def test_docx(self):
        p = documents.docx_paragraph
        break_here = "<w:lastRenderedPageBreak/>"
        table = f"<w:tbl><w:tr><w:tc>{p('one')}</w:tc><w:tc>{p('two')}</w:tc></w:tr></w:tbl>"
        deleted = "<w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del><w:ins><w:r><w:t>kept</w:t></w:r></w:ins></w:p>"
        file = documents.docx(p("A title", "Heading1") + p("First &lt;paragraph&gt;.") + table + deleted + p("On page two.", more=break_here),
                              footnotes=f'<w:footnote w:id="2">{p("A note.")}</w:footnote>')
        self.assertEqual(self.read(file), "# A title\n\nFirst <paragraph>.\n\none | two\n\nkept\n\nOn page two.\n\n[1] A note.\n")
        self.assertEqual(self.place("On page two")[0], 2)
        notes = {kind: [f'<w:{kind} w:id="{i}">{p(f"{kind} {i}")}</w:{kind}>' for i in (2, 3)] for kind in ("footnote", "endnote")}
        body = "".join(p(f"Text {i}", more=f'<w:{kind}Reference w:id="{i}"/>') for kind, i in (("footnote", 3), ("endnote", 2), ("footnote", 2)))
        file = documents.docx(body, footnotes="".join(notes["footnote"]), endnotes="".join(notes["endnote"]))
        self.assertEqual(self.read(file), "[1]Text 3\n\n[2]Text 2\n\n[3]Text 2\n\n[3] footnote 2\n\n[1] footnote 3\n\n[2] endnote 2\n\n[4] endnote 3\n")

    def test_cells_of_docx_tables_stand_in_their_columns(self):
        def cell(text, columns="", more=""):
            span = f'<w:gridSpan w:val="{columns}"/>' if columns else ""
            return f"<w:tc><w:tcPr>{span}{more}</w:tcPr>{documents.docx_paragraph(text)}</w:tc>"

        def table(*rows):
            return "<w:tbl>" + "".join(f"<w:tr>{row}</w:tr>" for row in rows) + "</w:tbl>"

        before = '<w:trPr><w:gridBefore w:val="2"/></w:trPr>'
        goes_on = "<w:vMerge/>"
        self.assertEqual(self.read(documents.docx(table(cell("a", 2) + cell("b") + cell("c", 9), before + cell("x") + cell("y"), cell("", 2, goes_on) + cell("z")))), "a | | b | c\n| | x | y\n| | z\n")
        # A table in a cell has columns of its own; spans of before a change are past.
        inner = f"<w:tc><w:tcPr><w:gridSpan w:val='2'/></w:tcPr>{table(cell('b', 3) + cell('c', 4))}<w:p/></w:tc>"
        self.assertEqual(self.read(documents.docx(table(cell("a") + inner + cell("d")))), "a |\n\nb | | | c | | d\n")
        old = '<w:tcPrChange><w:tcPr><w:gridSpan w:val="5"/></w:tcPr></w:tcPrChange>'
        self.assertEqual(self.read(documents.docx(table(cell("a", 2, old) + cell("b"), cell("c", -7) + cell("d", "x") + cell("e", 0) + cell("f")))), "a | | b\nc | d | e | f\n")
        self.assertEqual(self.read(documents.docx(table(cell("a", 2000000000) + cell("b")))), "a |" + " |" * 255 + " b\n")
        rows = [cell("a", 1000) + cell("b")] * 1000
        self.assertLess(len(self.read(documents.docx(table(*rows)))), 2 * (2048 + 8 * 2000) + 8 * 1000)

    def test_office_documents_of_other_programs(self):
        """Other prefixes of namespaces than usual, none, and parts with other names."""
        p = documents.docx_paragraph
        word = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
        listed = '<w:p><w:pPr><w:numPr><w:ilvl w:val="0"/><w:numId w:val="1"/></w:numPr></w:pPr><w:r><w:t>one</w:t></w:r></w:p>'
        body = f'<w:document {word}><w:body>{p("Head", style="Heading2")}{listed}{listed}{p("b", more="<w:lastRenderedPageBreak/>")}</w:body></w:document>'
        numbers = (f'<w:numbering {word}><w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="decimal"/><w:lvlText w:val="%1."/></w:lvl>'
                   '</w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num></w:numbering>')
        note = f'<w:footnotes {word}><w:footnote w:id="2">{listed}</w:footnote></w:footnotes>'
        want = "## Head\n\n1. one\n2. one\nb\n\n[1] 1. one\n"  # lists of notes are counted by themselves

        def renamed(xml, prefix):
            xml = xml.replace("<w:", f"<{prefix}:").replace("</w:", f"</{prefix}:").replace(" w:", f" {prefix}:").replace("xmlns:w=", f"xmlns:{prefix}=")
            return xml

        usual = {"[Content_Types].xml": "<Types/>", "word/document.xml": body, "word/numbering.xml": numbers, "word/footnotes.xml": note}
        self.assertEqual(self.read(documents.archive(usual)), want)
        self.assertEqual(self.read(documents.archive({name: renamed(xml, "ns0") for name, xml in usual.items()})), want)
        default = body.replace("<w:", "<").replace("</w:", "</").replace("xmlns:w=", 'xmlns="http://schemas.openxmlformats.org/wordprocessingml/2006/main" xmlns:w=')
        self.assertEqual(self.read(documents.archive({**usual, "word/document.xml": default})), want)
        strict = {name: xml.replace("http://schemas.openxmlformats.org/wordprocessingml/2006/main", "http://purl.oclc.org/ooxml/wordprocessingml/main") for name, xml in usual.items()}
        self.assertEqual(self.read(documents.archive({name: renamed(xml, "x") for name, xml in strict.items()})), want)
        space, office = "http://schemas.openxmlformats.org/package/2006/relationships", "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
        relations = {
            "_rels/.rels": f'<Relationships xmlns="{space}"><Relationship Id="a" Type="{office}/officeDocument" Target="/word/document2.xml"/></Relationships>',
            "word/_rels/document2.xml.rels": f'<r:Relationships xmlns:r="{space}"><r:Relationship Type="{office}/numbering" Target="numbers/n1.xml"/>'
                                             f'<r:Relationship Type="{office}/footnotes" Target="/notes.xml"/><r:Relationship Type="{office}/styles" Target="http://x/s.xml" TargetMode="External"/></r:Relationships>'}
        moved = {"[Content_Types].xml": "<Types/>", "word/document2.xml": body, "word/numbers/n1.xml": numbers, "notes.xml": note}
        self.assertEqual(self.read(documents.archive({**moved, **relations})), want)
        self.assertEqual(self.read(documents.archive({**usual, "_rels/.rels": "<Relationships>"})), want)  # damaged: usual names
        # Targets as people write them, some of nothing: usual names count then. Two kinds of notes in one part are said once.
        for target in ("word/document.xml", "./word/document.xml", "word//document.xml", "/word/x/../document.xml", "word/document%2Exml", "Word/Document.xml", "word/gone.xml", ""):
            odd = {"_rels/.rels": relations["_rels/.rels"].replace("/word/document2.xml", target),
                   "word/_rels/document.xml.rels": f'<Relationships xmlns="{space}"><Relationship Type="{office}/footnotes" Target="../word/footnotes.xml"/>'
                                                   f'<Relationship Type="{office}/endnotes" Target="footnotes.xml"/><Relationship Type="{office}/numbering" Target="Gone.xml"/></Relationships>'}
            self.assertEqual(self.read(documents.archive({**usual, **odd, "customXml/_rels/item1.xml.rels": "<"})), want)
        for prefix, pages in (("w", 1), ("x", 1)):
            self.read(documents.archive({name: renamed(xml, prefix) for name, xml in usual.items()}))
            self.assertEqual(self.place("b")[0], pages + 1)
        self.read(documents.docx(p("see w:lastRenderedPageBreak there")))
        self.assertEqual(self.place("see")[0], 0)
        odt = documents.odt('<text:h text:outline-level="1">A</text:h><text:p>b<text:s text:c="2"/>c</text:p>')
        with zipfile.ZipFile(io.BytesIO(odt)) as z:
            content = z.read("content.xml").decode()
        for name in ("office", "text", "table", "style"):
            content = content.replace(f"<{name}:", f"<n{name}:").replace(f"</{name}:", f"</n{name}:").replace(f" {name}:", f" n{name}:").replace(f"xmlns:{name}=", f"xmlns:n{name}=")
        self.assertEqual(self.read(documents.archive({"content.xml": content}, "application/vnd.oasis.opendocument.text")), "# A\n\nb  c\n")

    def test_odt(self):
        body = ('<text:tracked-changes><text:p>gone</text:p></text:tracked-changes><text:h text:outline-level="2">Head</text:h><text:p>One\n <text:s text:c="2"/>two.'
                "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>noted</text:p></text:note-body></text:note></text:p>"
                "<text:list><text:list-item><text:p>item</text:p></text:list-item></text:list>"
                "<table:table><table:table-row><table:table-cell><text:p>x</text:p></table:table-cell><table:table-cell><text:p>y</text:p></table:table-cell>"
                "</table:table-row></table:table>")
        self.assertEqual(self.read(documents.odt(body)), "## Head\n\nOne   two. [noted]\n- item\nx | y\n")
        note = "<text:note><text:note-citation>1</text:note-citation><text:note-body>{}</text:note-body></text:note>"
        body = f"<text:p>Anna{note.format('<text:p>On 3 March. </text:p>')} Bergstrom {note.format('<text:p>a</text:p><text:p>b</text:p>')}</text:p><text:p>{note.format('')}c</text:p>"
        self.assertEqual(self.read(documents.odt(body)), "Anna [On 3 March.] Bergstrom [a b]\n\n[]c\n")

    def test_cells_of_odt_tables_stand_in_their_columns(self):
        def cell(text="", columns=1):
            many = f' table:number-columns-repeated="{columns}"' if columns != 1 else ""
            return f"<table:table-cell{many}><text:p>{text}</text:p></table:table-cell>"

        def table(*rows):
            return "<table:table>" + "".join(f'<table:table-row table:number-rows-repeated="{times}">{"".join(cells)}</table:table-row>' for times, *cells in rows) + "</table:table>"

        covered = "<table:covered-table-cell/>"
        self.assertEqual(self.read(documents.odt(table((1, cell("a"), covered, cell("b")), (1, covered, cell("c"), cell("d")), (1, cell("e"), covered, covered)))), "a | | b\n| c | d\ne\n")
        hidden = '<table:covered-table-cell table:number-columns-repeated="2"><text:p>under it</text:p></table:covered-table-cell>'
        self.assertEqual(self.read(documents.odt(table((1, cell("a"), hidden, cell("b"))))), "a | | | b\n")
        # Equal neighbours stand there once; empty ones at the end of a row or of the table are as many as a sheet has.
        rest, rows = cell(columns=16384), 1048576
        body = table((1, cell("a", 3), cell("b"), rest), (1, cell("x"), cell("", 2), cell("y")), (1, cell("", 2), cell("z")), (2, cell("q"), cell("r", 2)), (rows, rest),
                     (rows, cell(), cell()), (1, rest, cell("far")))
        self.assertEqual(self.read(documents.odt(body + "<text:p>after</text:p>")),
                         "a | a | a | b\nx | | | y\n| | z\nq | r | r\nq | r | r\n" + "| " * 256 + "far\n\nafter\n")
        # A table in a cell has columns of its own.
        inner = table((2, cell("c", 2), covered, cell("d"))).replace("<table:table>", '<table:table table:is-sub-table="true">')
        self.assertEqual(self.read(documents.odt(table((1, cell("a", 2), f"<table:table-cell>{inner}</table:table-cell>", cell("b"))))), "a | a |\nc | c | | d\nc | c | | d\n\n| b\n")
        # Nonsense, and more than anybody reads.
        self.assertEqual(self.read(documents.odt(table((-1, cell("a", -3), cell("b", "x"), cell("c", 0)), ("", cell("d", "99999999999"))))), "a | b | c\nd\n")
        self.assertEqual(self.read(documents.odt(table((1, cell("a", 16384))))), " | ".join(["a"] * 256) + "\n")
        self.assertEqual(self.read(documents.odt(table((rows, cell("a"))))), "a\n" * 1000)

    def test_a_table_that_repeats_too_much_is_named(self):
        many = '<table:table><table:table-row table:number-rows-repeated="1048576"><table:table-cell><text:p>a</text:p></table:table-cell></table:table-row></table:table>'
        path = documents.write(self.folder, "many.odt", documents.odt(many))
        result = self.assert_done(run("index", "-m", self.model, "-f", path, "-o", self.folder / "many.lode"))
        self.assertIn("repeats cells or rows too often; some repeats are left out", result.err)

    def test_depth_of_odt_bullets(self):
        def items(*texts):
            return "<text:list>" + "".join(f"<text:list-item>{t}</text:list-item>" for t in texts) + "</text:list>"

        def p(text):
            return f"<text:p>{text}</text:p>"

        body = items(p("a"), p("b") + items(p("c") + items(p("d")) + p("more of c"), '<text:h text:outline-level="2">e</text:h>'), items(p("f")))
        self.assertEqual(self.read(documents.odt(body + items(p("g")))), "- a\n- b\n  - c\n    - d\nmore of c\n## e\n  - f\n- g\n")
        styled = ('<text:list-style style:name="L1"><text:list-level-style-number text:level="1" style:num-format="1" style:num-suffix="."/>'
                  '<text:list-level-style-bullet text:level="2"/></text:list-style>')
        body = items(p("a") + items(p("b")), p("c")).replace("<text:list>", '<text:list text:style-name="L1">', 1)
        self.assertEqual(self.read(documents.odt(body, styled)), "1. a\n  - b\n2. c\n")

    def test_numbers_of_word_lists(self):
        def level(i, text, form="decimal", more=""):
            return f'<w:lvl w:ilvl="{i}"><w:start w:val="1"/><w:numFmt w:val="{form}"/>{more}<w:lvlText w:val="{text}"/></w:lvl>'

        def item(text, number="", depth="", style=""):
            place = f'<w:numPr>{f"""<w:ilvl w:val="{depth}"/>""" if depth else ""}<w:numId w:val="{number}"/></w:numPr>' if number else ""
            named = f'<w:pStyle w:val="{style}"/>' if style else ""
            return f"<w:p><w:pPr>{named}{place}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"

        def numbering(*abstracts, nums=((1, 0, ""),)):
            return ("".join(f'<w:abstractNum w:abstractNumId="{i}">{levels}</w:abstractNum>' for i, levels in enumerate(abstracts))
                    + "".join(f'<w:num w:numId="{n}"><w:abstractNumId w:val="{of}"/>{more}</w:num>' for n, of, more in nums))

        clauses = level(0, "%1.") + level(1, "%1.%2") + level(2, "(%3)", "lowerLetter") + level(3, "%4)", "upperRoman")
        body = (item("a", "1", "0") + item("b", "1", "1") + item("c", "1", "1") + item("d", "1", "2") + item("e", "1", "2") + item("f", "1", "3")
                + item("g", "1", "0") + item("h", "1", "1"))
        self.assertEqual(self.read(documents.docx(body, numbering=numbering(clauses))), "1. a\n1.1 b\n1.2 c\n(a) d\n(b) e\nI) f\n2. g\n2.1 h\n")
        # Bullets, lists without a definition, and a list that goes on behind other text, or begins anew.
        again = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="7"/></w:lvlOverride>'
        body = item("a", "1") + item("b", "2") + item("c", "9") + item("plain") + item("d", "1") + item("e", "3") + item("f", "3") + item("none", "0")
        text = self.read(documents.docx(body, numbering=numbering(level(0, "%1."), level(0, "•", "bullet"), nums=((1, 0, ""), (2, 1, ""), (3, 0, again)))))
        self.assertEqual(text, "1. a\n- b\n- c\nplain\n\n2. d\n7. e\n8. f\nnone\n")
        # Headings that are numbered by their style, some by the style that theirs is based on; in Roman numerals but for references.
        styles = ('<w:style w:styleId="Heading1"><w:pPr><w:numPr><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
                  '<w:style w:styleId="Heading2"><w:basedOn w:val="Heading1"/></w:style><w:style w:styleId="Loop"><w:basedOn w:val="Loop"/></w:style>')
        levels = level(0, "%1.", "upperRoman") + level(1, "%1.%2", more='<w:pStyle w:val="Heading2"/><w:isLgl/>')
        body = item("One", style="Heading1") + item("x", style="Loop") + item("Two", style="Heading1") + item("Deep", style="Heading2")
        self.assertEqual(self.read(documents.docx(body, numbering=numbering(levels), styles=styles)), "# I. One\n\nx\n\n# II. Two\n\n## 2.1 Deep\n")
        # Nonsense in the definitions.
        odd = level(12, "%1") + level(0, "%9%%%1%", "chicago") + '<w:lvl w:ilvl="x"/>'
        self.assertEqual(self.read(documents.docx(item("a", "1") + item("b", "1", "77"), numbering=numbering(odd))), "1%%1% a\n1%%2% b\n")

    def test_numbers_of_odd_word_lists(self):
        def level(text, form="decimal", more="", i=0):
            return f'<w:lvl w:ilvl="{i}"><w:start w:val="1"/><w:numFmt w:val="{form}"/>{more}<w:lvlText w:val="{text}"/></w:lvl>'

        def item(text, number="1", depth="0", mark="", style=""):
            named = f'<w:pStyle w:val="{style}"/>' if style else ""
            return f'<w:p><w:pPr>{named}<w:numPr><w:ilvl w:val="{depth}"/><w:numId w:val="{number}"/></w:numPr>{mark}</w:pPr>{text}</w:p>'

        def run(text):
            return f"<w:r><w:t>{text}</w:t></w:r>"

        def numbering(levels, more=""):
            return (f'<w:abstractNum w:abstractNumId="0">{levels}</w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
                    f'<w:num w:numId="2"><w:abstractNumId w:val="0"/>{more}</w:num>')

        plain = numbering(level("%1.") + level("%1.%2", i=1))
        # Rows of a table that hold a number alone; a number whose paragraph is hidden or deleted is not there.
        rows = "".join(f"<w:tr><w:tc>{item('')}</w:tc><w:tc><w:p>{run(fruit)}</w:p></w:tc></w:tr>" for fruit in ("apple", "pear"))
        self.assertEqual(self.read(documents.docx(f"<w:tbl>{rows}</w:tbl>", numbering=plain)), "1. | apple\n2. | pear\n")
        gone = item("<w:r><w:rPr><w:vanish/></w:rPr><w:t>b</w:t></w:r>", mark="<w:rPr><w:vanish/></w:rPr>")
        deleted = item("<w:del><w:r><w:delText>c</w:delText></w:r></w:del>", mark='<w:rPr><w:del w:id="1"/></w:rPr>')
        self.assertEqual(self.read(documents.docx(item(run("a")) + gone + deleted + item(run("d")), numbering=plain)), "1. a\n2. d\n")
        # A text box in a numbered paragraph, with a number of its own.
        box = f"<w:r><w:txbxContent>{item(run('in the box'))}</w:txbxContent></w:r>"
        self.assertEqual(self.read(documents.docx(item(box + run("around it")) + item(run("b")), numbering=plain)), "2. in the box\n1. around it\n3. b\n")
        # A list with a level of its own, bullets that show nothing, a mark with nothing behind it, and a level that goes on.
        own = f'<w:lvlOverride w:ilvl="0">{level("(%1)", "upperLetter")}</w:lvlOverride>'
        self.assertEqual(self.read(documents.docx(item(run("a")) + item(run("b"), "2"), numbering=numbering(level("%1."), own))), "1. a\n(B) b\n")
        self.assertEqual(self.read(documents.docx(item(run("a")) + item(run("b")), numbering=numbering(level(" ", "bullet")))), "a\n\nb\n")
        joined = level("%1. ", more='<w:suff w:val="nothing"/>') + level("%2)", more='<w:suff w:val="nothing"/><w:lvlRestart w:val="0"/>', i=1)
        body = item(run("a")) + item(run("b"), depth="1") + item(run("c")) + item(run("d"), depth="1")
        self.assertEqual(self.read(documents.docx(body, numbering=numbering(joined))), "1. a\n1)b\n2. c\n2)d\n")
        # Names of styles in a localised Word; numbers that a style had before a change.
        styles = ('<w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style><w:style w:styleId="Alt"><w:pPr><w:pPrChange><w:pPr><w:numPr>'
                  '<w:numId w:val="1"/></w:numPr></w:pPr></w:pPrChange></w:pPr></w:style>')
        old = '<w:p><w:pPr><w:pStyle w:val="Alt"/></w:pPr><w:r><w:t>plain</w:t></w:r></w:p>'
        self.assertEqual(self.read(documents.docx(item(run("Kopf"), style="berschrift1") + old, numbering=plain, styles=styles)), "# 1. Kopf\n\nplain\n")
        # Definitions that are damaged leave the text.
        self.assertEqual(self.read(documents.docx(item(run("a")), numbering="<w:num>")), "- a\n")

    def test_numbers_of_odt_lists(self):
        def numbers(level, form, suffix=".", more=""):
            return f'<text:list-level-style-number text:level="{level}" style:num-format="{form}" style:num-suffix="{suffix}" {more}/>'

        def items(*texts, style="", more=""):
            named = f' text:style-name="{style}"' if style else ""
            return f"<text:list{named}{more}>" + "".join(t if t.startswith("<") else f"<text:list-item><text:p>{t}</text:p></text:list-item>" for t in texts) + "</text:list>"

        style = (f'<text:list-style style:name="L1">{numbers(1, "1")}{numbers(2, "a", ")")}{numbers(3, "1", "", """text:display-levels="3" """)}</text:list-style>'
                 '<text:list-style style:name="L2"><text:list-level-style-bullet text:level="1"/></text:list-style>')
        inner = f"<text:list-item><text:p>b</text:p>{items('c', 'd', '<text:list-item>' + items('e') + '</text:list-item>')}</text:list-item>"
        started = '<text:list-item text:start-value="9"><text:p>j</text:p></text:list-item>'
        body = (items("a", inner, "f", style="L1") + items("g", style="L2") + "<text:p>plain</text:p>" + items("h", style="L1")
                + items("i", started, style="L1", more=' text:continue-numbering="true"') + items("k", style="unknown"))
        want = "1. a\n2. b\na) c\nb) d\n2.b.1 e\n3. f\n- g\n\nplain\n1. h\n2. i\n9. j\n- k\n"
        self.assertEqual(self.read(documents.odt(f"<office:automatic-styles>{style}</office:automatic-styles>{body}")), want)
        self.assertEqual(self.read(documents.odt(body, style)), want)
        # Lists that go on: behind a paragraph with a list in an item that has no text of its own, and with the one that they name.
        deep = "<text:list-item>" + items("{}", "{}") + "</text:list-item>"
        levels = f'<text:list-style style:name="L1">{numbers(1, "1")}{numbers(2, "1", "", """text:display-levels="2" """)}</text:list-style>'
        goes_on = ' text:continue-numbering="true"'
        body = (items("a", f"<text:list-item><text:p>b</text:p>{items('c', 'd')}</text:list-item>", style="L1") + "<text:p>plain</text:p>"
                + items(deep.format("e", "f"), "g", style="L1", more=goes_on) + items("h", "<text:list-item/>", "i", style="L1"))
        self.assertEqual(self.read(documents.odt(body, levels)), "1. a\n2. b\n2.1 c\n2.2 d\n\nplain\n2.3 e\n2.4 f\n3. g\n1. h\n2. i\n")
        body = (items("a", "b", style="L1", more=' xml:id="one"') + items("c", style="L1", more=' xml:id="two"')
                + items("d", style="L1", more=' text:continue-list="one"') + items("e", style="L1", more=' text:continue-list="two"'))
        self.assertEqual(self.read(documents.odt(body, levels)), "1. a\n2. b\n1. c\n3. d\n2. e\n")
        outline = ('<text:outline-style><text:outline-level-style text:level="1" style:num-format="1"/>'
                   '<text:outline-level-style text:level="2" style:num-format="1" text:display-levels="2"/>'
                   '<text:outline-level-style text:level="3" style:num-format=""/></text:outline-style>')
        heads = "".join(f'<text:h text:outline-level="{n}">{text}</text:h>' for n, text in ((1, "a"), (2, "b"), (2, "c"), (3, "d"), (1, "e"), (2, "f")))
        more = ('<text:h text:outline-level="1" text:is-list-header="true">x</text:h><text:h text:outline-level="1" text:restart-numbering="true" '
                'text:start-value="7">y</text:h><text:h text:outline-level="1">z</text:h>')
        self.assertEqual(self.read(documents.odt(heads + more, outline)), "# 1 a\n\n## 1.1 b\n\n## 1.2 c\n\n### d\n\n# 2 e\n\n## 2.1 f\n\n# x\n\n# 7 y\n\n# 8 z\n")
        self.assertEqual(self.read(documents.odt(heads, outline)), "# 1 a\n\n## 1.1 b\n\n## 1.2 c\n\n### d\n\n# 2 e\n\n## 2.1 f\n")

    def test_titles_of_office_documents_stand_once(self):
        p = documents.docx_paragraph
        self.assertEqual(self.read(documents.docx(p("The lamp", "Title") + p("The lamp", "Heading1") + p("It burns."))), "# The lamp\n\nIt burns.\n")
        self.assertEqual(self.read(documents.docx(p("The lamp", "Title") + p("One", "Heading1") + p("The lamp", "Heading1"))), "# The lamp\n\n# One\n\n# The lamp\n")
        box = '<w:p><w:r><mc:AlternateContent xmlns:mc="m"><mc:Choice>{0}</mc:Choice><mc:Fallback>{0}</mc:Fallback></mc:AlternateContent></w:r></w:p>'
        self.assertEqual(self.read(documents.docx(box.format(p("The lamp")) + p("It burns."))), "The lamp\n\nIt burns.\n")
        self.assertEqual(self.read(documents.docx(p("The lamp", "Title") + p("By Nora") + p("The lamp", "Heading1"))), "# The lamp\n\nBy Nora\n\n# The lamp\n")
        head = '<text:h text:outline-level="1">{}</text:h>'
        title = '<text:p text:style-name="Title">The lamp</text:p>'
        self.assertEqual(self.read(documents.odt(title + "<text:p/>" + head.format("The lamp") + "<text:p>It burns.</text:p>")), "# The lamp\n\nIt burns.\n")
        self.assertEqual(self.read(documents.odt(title + "<text:p>By Nora</text:p>" + head.format("The lamp"))), "# The lamp\n\nBy Nora\n\n# The lamp\n")
        self.assertEqual(self.read(documents.odt('<text:p text:style-name="Title">The <text:span>lamp</text:span></text:p>' + head.format("The lamp") + "<text:p>It burns.</text:p>")),
                         "# The lamp\n\nIt burns.\n")
        self.assertEqual(self.read(documents.odt('<text:p text:style-name="Title">The lamp</text:p>' + head.format("Light"))), "# The lamp\n\n# Light\n")

    def test_hidden_text_of_office_documents_is_not_read(self):
        def hidden(properties):
            return f"<w:p><w:pPr><w:rPr><w:vanish/></w:rPr></w:pPr><w:r><w:t>a</w:t></w:r><w:r><w:rPr>{properties}</w:rPr><w:t>b</w:t><w:tab/></w:r><w:r><w:t>c</w:t></w:r></w:p>"

        self.assertEqual(self.read(documents.docx(hidden("<w:vanish/>"))), "ac\n")
        self.assertEqual(self.read(documents.docx(hidden('<w:vanish w:val="0"/><w:rPrChange><w:rPr><w:vanish/></w:rPr></w:rPrChange>'))), "ab\tc\n")
        moved = "<w:p><w:moveFrom><w:r><w:t>moved</w:t></w:r></w:moveFrom></w:p><w:p><w:moveTo><w:r><w:t>moved</w:t></w:r></w:moveTo></w:p>"
        self.assertEqual(self.read(documents.docx(moved)), "moved\n")
        space = 'xmlns:style="urn:oasis:names:tc:opendocument:xmlns:style:1.0"'
        styles = (f'<office:automatic-styles {space}><style:style style:name="T1"><style:text-properties text:display="none"/></style:style>'
                  '<style:style style:name="T2"><style:text-properties/></style:style></office:automatic-styles>')
        self.assertEqual(self.read(documents.odt(styles + '<text:p>a<text:span text:style-name="T1">b<text:s/></text:span><text:span text:style-name="T2">c</text:span>'
                                                 '<text:hidden-text text:is-hidden="true">d</text:hidden-text></text:p>')), "ac\n")
        for off in ("", ' text:is-hidden="false"'):
            self.assertEqual(self.read(documents.odt(f"<text:p>a<text:hidden-text{off}>b</text:hidden-text> c<text:hidden-paragraph{off}/></text:p>")), "ab c\n")
        gone = '<text:p>gone<text:hidden-paragraph text:is-hidden="true"/> too</text:p>'
        sections = "".join(f"<text:section {how}><text:p>{text}</text:p></text:section>" for text, how in (
            ("b", 'text:display="none"'), ("c", 'text:display="condition" text:is-hidden="true"'), ("d", 'text:display="condition"')))
        self.assertEqual(self.read(documents.odt(f"<text:p>a</text:p>{gone}{sections}<text:p>e</text:p>")), "a\n\nd\n\ne\n")
        hides = '<style:text-properties text:display="none"/>'
        others = (f'<office:automatic-styles {space}><style:style style:name="P1"><style:text-properties/></style:style>'
                  f"<text:list-style><text:list-level-style-number>{hides}</text:list-level-style-number></text:list-style>"
                  f'<style:style style:name="P2"/><style:default-style>{hides}</style:default-style></office:automatic-styles>')
        self.assertEqual(self.read(documents.odt(others + '<text:p text:style-name="P1">a</text:p><text:p text:style-name="P2">b</text:p><text:p>c</text:p>')), "a\n\nb\n\nc\n")

    def test_a_heading_without_text_makes_none_of_the_next_paragraph(self):
        p = documents.docx_paragraph
        self.assertEqual(self.read(documents.docx(p("a") + p("secret", "Heading1", "<w:rPr><w:vanish/></w:rPr>") + p("It burns."))), "a\n\nIt burns.\n")
        self.assertEqual(self.read(documents.docx(p("a"), footnotes=f'<w:footnote w:id="2">{p("")}{p("A note.")}</w:footnote>')), "a\n\n[1] A note.\n")
        self.assertEqual(self.read(documents.odt('<text:h text:outline-level="1"/><text:p>It burns.</text:p><text:list><text:list-item><text:p/><text:p>a</text:p>'
                                                 "</text:list-item><text:list-item><text:p/></text:list-item></text:list><text:p>b</text:p>")), "It burns.\n- a\n\nb\n")

    def test_a_folder(self):
        folder = self.folder / "papers"
        documents.write(folder, "chapter 10.txt", "Ten.\n")
        documents.write(folder, "chapter 2.txt", "Two.\n")
        documents.write(folder, "deep/page.html", "<html><body><p>Deep.</p></body></html>")
        documents.write(folder, "b.pdf", documents.pdf([["Page one of the report."], ["Page two of the report."]]))
        documents.write(folder, "image.png", b"\x89PNG\r\n\x1a\n")
        documents.write(folder, "skip.log", "log\n")
        secret = documents.write(self.folder, "secret.txt", "secret\n")
        (folder / "link.txt").symlink_to(secret)
        (folder / "out").symlink_to(self.folder)
        output = self.folder / "papers.lode"
        result = self.assert_done(run("index", "-m", self.model, "-f", folder, "-o", output, "--exclude", "*.log", "--json"))
        self.assertEqual(text_of(output), "File: papers/b.pdf, page 1\n\nPage one of the report.\n\nFile: papers/b.pdf, page 2\n\nPage two of the report.\n\n"
                                          "File: papers/chapter 2.txt\n\nTwo.\n\nFile: papers/chapter 10.txt\n\nTen.\n\nFile: papers/deep/page.html\n\nDeep.\n")
        unread = {pathlib.Path(u["path"]).name: u["why"] for u in result.json()["unread"]}
        self.assertEqual(set(unread), {"image.png", "link.txt", "out"})
        self.assertIn("OCR", unread["image.png"])
        self.assertIn("link", unread["link.txt"])
        self.assertIn("not read: ", result.err)
        result = self.assert_done(run("index", "-m", self.model, "-f", folder, "-o", output, "--include", "*.txt", "--restart", "--json"))
        self.assertEqual([f["path"] for f in result.json()["files"]], ["papers/chapter 2.txt", "papers/chapter 10.txt"])

    def test_a_repository_respects_its_ignore_files(self):
        folder = self.folder / "repository"
        for name, text in ((".gitignore", "build/\n*.tmp\n"), ("main.c", "int main;\n"), ("build/x.c", "no\n"), ("a.tmp", "no\n"), ("new.md", "untracked\n")):
            documents.write(folder, name, text)
        git = ("git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", folder)
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", "main.c"], check=True)
        subprocess.run([*git, "commit", "-qm", "x"], check=True)
        (folder / ".git/hooks/post-index-change").write_text("#!/bin/sh\ntouch /tmp/hooked\n", encoding="utf-8")
        output = self.folder / "repository.lode"
        result = self.assert_done(run("index", "-m", self.model, "-f", folder, "-o", output, "--json"))
        self.assertEqual([f["path"] for f in result.json()["files"]], ["repository/.gitignore", "repository/new.md", "repository/main.c"])

    def test_sources_have_places(self):
        pages = [[f"On page {n} the bell rang {n} times for the widow."] for n in range(1, 4)]
        path = documents.write(self.folder, "bells.pdf", documents.pdf(pages))
        output = self.folder / "bells.lode"
        self.assert_done(run("index", "-m", self.model, "-f", path, "-o", output))
        text = text_of(output)
        for source in self.assert_done(run("ask", output, "Who?", "-n", "4", "--show-sources", "--json")).json()["answers"][0]["sources"]:
            self.assertEqual(source["type"], "page_location")
            self.assertEqual(source["document_title"], str(path))
            self.assertEqual(text[source["start_char_index"] : source["end_char_index"]], source["cited_text"])
            self.assertIn(f"On page {source['start_page_number']} ", source["cited_text"])
            self.assertGreater(source["end_page_number"], source["start_page_number"])
            self.assertEqual(source["line"], 1)


class Several(ProgramTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.contexts = [cls.folder / f"{name}.lode" for name in ("north", "south")]
        cls.tokens = []
        for n, context in enumerate(cls.contexts):
            text = documents.write(cls.folder, f"{context.stem}.txt", part(n))
            result = run("index", "-m", cls.model, "-f", text, "-o", context, "-a", "kmeans", "--kv-type", "f32", "--json", "--quiet")
            cls.tokens.append(result.json()["tokens"])

    def test_each_answers_for_itself(self):
        result = self.assert_done(run("ask", *self.contexts, "Who rang?", "When?", "-n", "4", "--json")).json()
        self.assertEqual([c["context"] for c in result["contexts"]], list(map(str, self.contexts)))
        for context, tokens in zip(result["contexts"], self.tokens):
            self.assertEqual([a["question"] for a in context["answers"]], ["Who rang?", "When?"])
            self.assertEqual(context["answers"][0]["tokens_reused"], tokens)
        shown = self.assert_done(run("ask", *self.contexts, "Who rang?", "-n", "4", "--quiet")).out
        for context in self.contexts:
            self.assertIn(f"{context}:\n", shown)

    def test_all_answer_at_once(self):
        for more in ((), ("-a", "kmeans"), ("--exact", "-a", "kmeans"), ("--show-sources",), ("--check-sources",)):
            with self.subTest(more):
                result = run("ask", *self.contexts, "Who rang?", "-n", "4", "--union", "--json", *more)
                found = self.assert_done(result).json()
                self.assertEqual((found["context"], found["joined"]), (str(self.contexts[0]), [str(self.contexts[1])]))
                self.assertEqual(found["answers"][0]["tokens_reused"], sum(self.tokens) - 1, "one BOS is enough")
                self.assertRegex(result.err, r"south\.lode: joined without being read again; .* [0-9.]+ % from those of one reading")

    def test_what_cannot_be_joined(self):
        first, second = self.contexts
        self.assert_refused(run("ask", first, "Who?", "--union"), "several .lode files")
        self.assert_refused(run("ask", first, second), "expected questions")
        self.assert_refused(run("ask", first, second, "Who?", "--union", "-a", "h2o", "--quiet"), "learns from the prefill")
        self.assert_refused(run("ask", first, second, "Who?", "--union", "-c", str(max(self.tokens) + 100)), "fewer than")
        otherwise = self.folder / "otherwise.lode"
        self.assert_done(run("index", "-m", tiny_model.write(self.folder / "otherwise", seed=2), "-f", self.text, "-o", otherwise, "--quiet"))
        refused = self.assert_refused(run("ask", first, otherwise, "Who?", "--union"), "otherwise.lode", "leave --union out")
        self.assertNotIn("-m", refused.err.split())
        other = self.index("other.lode", "--kv-type", "f16")
        self.assert_refused(run("ask", first, other, "Who?", "--union"), "other.lode", "f32")


class Refused(ProgramTest):
    """What cannot be read is named, with what to do about it; hostile_test.py has what was made to harm."""

    def refused(self, data: bytes | str, *mentions: str):
        path = documents.write(self.folder, "some.file", data)
        self.assert_refused(run("index", "-m", self.model, "-f", path, "-o", self.folder / "never.lode", "--quiet"), *mentions)
        self.assertFalse((self.folder / "never.lode").exists())

    def test_a_program_that_is_missing_is_named(self):
        path = documents.write(self.folder, "a.pdf", documents.pdf([["A page."]]))
        self.assert_refused(run("index", "-m", self.model, "-f", path, "-o", self.folder / "never.lode", env={"PATH": "/nowhere"}), "poppler-utils")

    def test_archives_that_are_no_documents(self):
        self.refused(documents.archive({"a.txt": "x"}), "ZIP archive")
        self.refused(documents.archive({"xl/workbook.xml": "<x/>"}), "spreadsheet")
        good = documents.docx(documents.docx_paragraph("text"))
        self.refused(good.replace(b"word/document.xml", b"word/d0cument.xml"), "ZIP archive")
        self.refused(documents.epub({"a.xhtml": "<p>x</p>"}).replace(b"META-INF/container.xml", b"META-INF/c0ntainer.xml"), "container.xml")
        self.refused(documents.archive({"META-INF/container.xml": "<container>"}, "application/epub+zip"), "XML")
        self.refused(documents.odt(""), "none in it")

    def test_what_is_no_document(self):
        for data, what in ((b"{\\rtf1 x}", "RTF"), (bytes(range(1, 256)) * 9, "binary"), (("é" * 9).encode()[:-1], "UTF-8")):
            self.refused(data, what)


if __name__ == "__main__":
    unittest.main()
