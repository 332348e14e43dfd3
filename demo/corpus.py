"""Text for the demo model: Debian packages in, titled documents of seven kinds out.

Every source is either in the public domain or under a permissive licence, so that the
weights can carry the licence of this repository. Copyleft texts that Debian also ships
(FOLDOC, GCIDE, the Debian handbook) are left out for that reason alone.
"""

import gzip
import hashlib
import json
import re
import subprocess
import textwrap
import zlib
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path


@dataclass(frozen=True)
class Document:
    kind: str
    title: str
    body: str

    @property
    def held_out(self) -> bool:
        """Two documents in a hundred are never trained on; the choice needs no state."""
        name = f"{self.kind}/{self.title}/{self.body[:80]}"
        return hashlib.sha256(name.encode()).digest()[0] < 5

    def plain(self) -> str:
        return f"{self.title}{TITLE_END[self.kind]}{self.body}"


# One package (or two) per kind, with the licence that debian/copyright states for the text.
PACKAGES = {
    "scripture": ["bible-kjv", "bible-kjv-text"],
    "novel": ["r-cran-janeaustenr"],
    "dictionary": ["wordnet-base"],
    "jargon": ["dict-jargon"],
    "python": ["python3.11-doc"],
    "rust": ["rust-doc"],
    "sql": ["postgresql-doc-15"],
}
KINDS = list(PACKAGES)
TITLE_END = {kind: "\n\n" for kind in KINDS} | {"dictionary": ", "}

# Books in the order of the text; the program abbreviates their names.
BOOKS = """Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings
2_Kings 1_Chronicles 2_Chronicles Ezra Nehemiah Esther Job Psalms Proverbs Ecclesiastes
Song_of_Solomon Isaiah Jeremiah Lamentations Ezekiel Daniel Hosea Joel Amos Obadiah Jonah Micah
Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark Luke John Acts Romans 1_Corinthians
2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians 2_Thessalonians 1_Timothy
2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John 2_John 3_John Jude Revelation""".split()


def unpack(cache: Path) -> dict[str, Path]:
    """Downloads and unpacks the packages below `cache`; nothing is installed."""
    roots = {}
    for package in (name for names in PACKAGES.values() for name in names):
        roots[package] = root = cache / "packages" / package
        if root.exists():
            continue
        archives = cache / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", package], cwd=archives, check=True)
        (archive,) = archives.glob(f"{package}_*.deb")
        # A folder that exists is taken as complete above, so it gets its name last.
        partial = root.with_suffix(".partial")
        partial.mkdir(parents=True, exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", archive, partial], check=True)
        partial.rename(root)
    return roots


def scripture(roots):
    program = (roots["bible-kjv"] / "usr/bin/bible").resolve()
    # The program looks for its data in the folder it is run in.
    folder = roots["bible-kjv-text"] / "usr/lib"
    out = subprocess.run(
        [program, "-f", "gen1:1-rev22:21"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout
    chapters: dict[tuple[str, str], list[str]] = {}
    abbreviations: list[str] = []
    for line in out.splitlines():
        book, chapter, verse, text = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line).groups()
        if book not in abbreviations:
            abbreviations.append(book)
        name = BOOKS[abbreviations.index(book)].replace("_", " ")
        chapters.setdefault((name, chapter), []).append(f"{verse} {text.strip()}")
    for (book, chapter), verses in chapters.items():
        yield Document("scripture", f"{book} {chapter}", "\n".join(verses))


def novel(roots):
    """Jane Austen's six novels, which the package keeps as R vectors of lines."""
    folder = roots["r-cran-janeaustenr"] / "usr/lib/R/site-library/janeaustenr/data"
    packed = (folder / "Rdata.rdb").read_bytes()
    while packed:
        # Each object: its length in 4 bytes, then a zlib stream.
        stream = zlib.decompressobj()
        data = stream.decompress(packed[4:])
        packed = stream.unused_data
        lines, at = [], data.index(b"\x00\x04\x00\x09")
        # A string: flags, type 9 (CHARSXP), length in 4 bytes, the bytes.
        while data[at + 2 : at + 4] == b"\x00\x09":
            end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")
            lines.append(data[at + 8 : end].decode())
            at = end
        title = lines[0].title()
        parts = re.split(r"\n+(chapter [\divxlc]+)\.?\n", "\n".join(lines), flags=re.I)
        for number, (heading, text) in enumerate(zip(parts[1::2], parts[2::2], strict=True), 1):
            paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if p.strip()]
            body = "\n\n".join(paragraphs).replace("_", "")
            body = re.sub(r"\s*--[\s-]*", " -- ", body)
            if len(body) > 500:
                yield Document("novel", f"{title}, {heading.capitalize()} ({number})", body)


def dictionary(roots):
    """One document per WordNet synset: its words, part of speech, gloss with examples."""
    folder = roots["wordnet-base"] / "usr/share/wordnet"
    for part in ["noun", "verb", "adj", "adv"]:
        for line in (folder / f"data.{part}").read_text().splitlines():
            if line.startswith(" "):
                continue
            head, gloss = line.split(" | ", 1)
            fields = head.split()
            words = [fields[4 + 2 * i] for i in range(int(fields[3], 16))]
            words = [re.sub(r"\(.*\)", "", w).replace("_", " ") for w in words]
            name = {"adj": "adjective", "adv": "adverb"}.get(part, part)
            yield Document("dictionary", ", ".join(words), f"{name}: {gloss.strip()}.")


def jargon(roots):
    path = roots["dict-jargon"] / "usr/share/dictd/jargon.dict.dz"
    text = gzip.decompress(path.read_bytes()).decode()
    text = text[text.index("\n(TM)\n") :]
    # A headword stands alone at the margin, its text is indented below it.
    for entry in re.split(r"\n(?=\S)", text):
        title, _, rest = entry.strip("\n").partition("\n")
        paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", rest) if p.strip()]
        # Braces mark cross references, slashes a pronunciation that this model does not need.
        paragraphs = [re.sub(r"\{ ?([^{}]*)\}", r"\1", p) for p in paragraphs]
        if paragraphs and re.fullmatch(r"/.*|[a-z]+\.( .*)?", paragraphs[0]):
            paragraphs = paragraphs[1:]
        body = "\n\n".join(paragraphs)
        if len(body) > 40:
            yield Document("jargon", title, body)


def python(roots):
    folder = roots["python3.11-doc"] / "usr/share/doc/python3.11/html/_sources"
    for book in ["tutorial", "library", "reference", "howto", "faq", "using"]:
        for path in sorted((folder / book).glob("*.txt")):
            text = path.read_text()
            # Comments, index entries and authorship are markup, not manual.
            hidden = r"^ *\.\. *(index|sectionauthor|moduleauthor|_|module)[^\n]*\n(?:   +[^\n]*\n)*"
            text = re.sub(hidden, "", text, flags=re.M)
            text = re.sub(r":[a-z:]+:`[!~]?([^`<]*?)(?: *<[^>`]*>)?`", r"`\1`", text)
            text = re.sub(r"`([^`<]+?) *<[^>`]*>`_+", r"\1", text)
            # reStructuredText underlines its headings.
            parts = re.split(r"^(\S[^\n]*)\n([=\-~^*#\"])\2{3,}\n", text, flags=re.M)
            for title, body in zip(parts[1::3], parts[3::3], strict=True):
                body = re.sub(r"\n{3,}", "\n\n", re.sub(r"^[=\-*]{4,}$", "", body, flags=re.M)).strip()
                if len(body) > 120:
                    yield Document("python", title.replace("`", "").replace("---", "-"), body)


class Page(HTMLParser):
    """Headings, paragraphs, list items and code of one manual page, in reading order."""

    ASIDES = {"Note", "Tip", "Caution", "Warning", "Important"}
    BLOCKS = {"p", "li", "dt", "dd", "pre", "h1", "h2", "h3", "h4", "h5", "td", "th", "div", "tr"}

    def __init__(self, html: str):
        super().__init__()
        self.sections, self.text, self.hidden, self.code = [("", [])], "", 0, False
        self.feed(html)
        self.flush()

    def flush(self, prefix=""):
        text = self.text.strip("\n").rstrip() if self.code else " ".join(self.text.split())
        if text.strip():
            self.sections[-1][1].append(prefix + text)
        self.text = ""

    def handle_starttag(self, tag, attrs):
        names = dict(attrs).get("class") or ""
        # Besides navigation: lines of Rust examples that the books themselves do not show.
        skipped = tag in ("div", "span") and re.search(r"nav|toc|buttons|menu|boring", names)
        if self.hidden or skipped or tag in ("nav", "script", "style", "head"):
            # Nested tags are counted only while hidden, so that the matching end is found.
            self.hidden += tag not in ("br", "hr", "img", "link", "meta", "input", "col")
        elif tag in self.BLOCKS:
            self.flush()
            self.code = tag == "pre"

    def handle_endtag(self, tag):
        if self.hidden:
            self.hidden -= 1
        elif tag in ("h1", "h2", "h3", "h4", "h5"):
            title = re.sub(r"^(Chapter |Appendix )?[A-Z\d][\d.]*\.\s+", "", " ".join(self.text.split()))
            if title in self.ASIDES:
                self.text = f"{title}: "
            else:
                self.text = ""
                self.sections.append((title.strip(" #"), []))
        elif tag in self.BLOCKS:
            self.flush("- " if tag == "li" else "")
            self.code = self.code and tag != "pre"

    def handle_data(self, data):
        if not self.hidden:
            self.text += data


# Headings that say nothing without the name of their page.
GENERIC_TITLES = {"Description", "Synopsis", "Examples", "Example", "Notes", "Compatibility", "Parameters"}
GENERIC_TITLES |= {"Options", "See Also", "Usage", "Outputs", "Environment", "Return Value", "Arguments", "Summary"}


def manual(kind, pages):
    for path in pages:
        html = path.read_text(errors="replace")
        start = max(html.find("<main"), html.find("<body"), 0)
        sections = Page(html[start:].replace("\u00a0", " ")).sections[1:]
        for title, blocks in sections:
            body = "\n\n".join(blocks)
            if title in GENERIC_TITLES:
                title = f"{sections[0][0]}: {title}"
            if len(body) > 120:
                yield Document(kind, title, body)


def rust(roots):
    folder = roots["rust-doc"] / "usr/share/doc/rust-doc/html"
    # The embedded book is left out: its prose is under a share-alike licence.
    books = ["book/ch*", "book/appendix*", "reference/**/*", "rust-by-example/**/*", "nomicon/**/*"]
    books += ["edition-guide/**/*", "rustc/**/*", "rustdoc/**/*"]
    pages = sorted({path for book in books for path in folder.glob(f"{book}.html")})
    yield from manual("rust", (path for path in pages if path.name != "print.html"))


def sql(roots):
    folder = roots["postgresql-doc-15"] / "usr/share/doc/postgresql-doc-15/html"
    skipped = re.compile(r"release-|bookindex|legalnotice|biblio|sql-keywords|acronyms|index\.html")
    yield from manual("sql", (p for p in sorted(folder.glob("*.html")) if not skipped.match(p.name)))


def documents(cache: Path) -> list[Document]:
    """All documents, extracted once and then read from the cache."""
    stored = cache / "documents.jsonl"
    if not stored.exists():
        roots = unpack(cache)
        # Several editions of one manual repeat each other: equal bodies are kept once.
        seen = {}
        for extract in [scripture, novel, dictionary, jargon, python, rust, sql]:
            for document in extract(roots):
                body = textwrap.dedent(document.body).strip()
                seen.setdefault((document.kind, body), Document(document.kind, document.title.strip(), body))
        partial = stored.with_suffix(".partial")
        with partial.open("w") as file:
            for document in seen.values():
                print(json.dumps(asdict(document), ensure_ascii=False), file=file)
        partial.rename(stored)
    with stored.open() as file:
        return [Document(**json.loads(line)) for line in file]
