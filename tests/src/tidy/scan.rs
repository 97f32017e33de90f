//! Rust sources as lines of code and comment, with test code marked. Not a parser: it relies on rustfmt's layout.

use super::Repo;

/// One line, split by what its characters are. Both halves keep their columns; the rest is blank.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// The code, without comments and without what stands between quotes.
    pub code: String,
    /// The comment.
    pub comment: String,
    /// Whether the line is compiled for tests only.
    pub test: bool,
}

/// A Rust file.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub path: &'a str,
    pub lines: Vec<Line>,
}

impl Source<'_> {
    /// Lines with their numbers from 1, test code left out.
    pub(super) fn shipped(&self) -> impl Iterator<Item = (usize, &Line)> {
        self.numbered().filter(|(_, line)| !line.test)
    }

    /// Lines with their numbers from 1.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (usize, &Line)> {
        self.lines.iter().enumerate().map(|(index, line)| (index + 1, line))
    }
}

/// Every Rust file of the repository, scanned.
pub(super) fn sources(repo: &Repo) -> Vec<Source<'_>> {
    let rust = repo.files().filter(|(path, _)| path.ends_with(".rs"));
    let mut sources: Vec<_> = rust.map(|(path, text)| Source { path, lines: split(text) }).collect();
    let gated: Vec<String> = sources.iter_mut().flat_map(mark_tests).collect();
    for source in &mut sources {
        let folder = source.path.split('/').any(|part| part == "tests" || part == "benches");
        let stem = source.path.trim_end_matches(".rs").trim_end_matches("/mod");
        let below = |gate: &String| stem == gate || source.path.starts_with(&format!("{gate}/"));
        if folder || stem.ends_with("/tests") || gated.iter().any(below) {
            source.lines.iter_mut().for_each(|line| line.test = true);
        }
    }
    sources
}

/// Index of the last line of the item that starts at `start`.
pub(super) fn item_end(lines: &[Line], start: usize) -> usize {
    let indent = lines[start].code.len() - lines[start].code.trim_start().len();
    let Some(head) = (start..lines.len()).find(|&at| lines[at].code.trim_end().ends_with(['{', ';', '}']))
    else {
        return start;
    };
    if !lines[head].code.trim_end().ends_with('{') {
        return head;
    }
    let closing = format!("{:indent$}}}", "");
    let closes = |at: &usize| lines[*at].code.starts_with(&closing);
    (head + 1..lines.len()).find(closes).unwrap_or(lines.len() - 1)
}

/// Marks `#[cfg(test)]` items and returns the paths, without `.rs`, of modules in files of their own among them.
fn mark_tests(source: &mut Source<'_>) -> Vec<String> {
    let mut gated = Vec::new();
    for start in 0..source.lines.len() {
        let code = source.lines[start].code.trim();
        if !code.starts_with("#[cfg(test)]") && !code.starts_with("#[cfg(any(test") {
            continue;
        }
        let end = item_end(&source.lines, start);
        source.lines[start..=end].iter_mut().for_each(|line| line.test = true);
        let item = source.lines[end].code.trim().trim_end_matches(';');
        if let Some((_, name)) = item.split_once("mod ") {
            let stem = source.path.trim_end_matches(".rs");
            let parent = ["/lib", "/mod", "/main"].iter().find_map(|name| stem.strip_suffix(name));
            gated.push(format!("{}/{name}", parent.unwrap_or(stem)));
        }
    }
    gated
}

enum Mode {
    Code,
    LineComment,
    BlockComment(usize),
    /// Inside quotes; the number of hashes that close a raw string.
    Text(Option<usize>),
}

/// Splits `text` into code and comments. What stands between quotes is in neither.
fn split(text: &str) -> Vec<Line> {
    let chars: Vec<char> = text.chars().collect();
    let mut lines = vec![Line::default()];
    let mut mode = Mode::Code;
    let mut at = 0;
    while at < chars.len() {
        let rest = &chars[at..];
        if rest[0] == '\n' {
            if matches!(mode, Mode::LineComment) {
                mode = Mode::Code;
            }
            lines.push(Line::default());
            at += 1;
            continue;
        }
        let in_comment = matches!(mode, Mode::LineComment | Mode::BlockComment(_));
        let before = at.checked_sub(1).map_or(' ', |at| chars[at]);
        let (taken, next, shown) = step(rest, before, mode);
        let line = lines.last_mut().expect("there is a first line");
        for c in &rest[..taken] {
            let comment = in_comment || matches!(next, Mode::LineComment | Mode::BlockComment(_));
            line.comment.push(if comment { *c } else { ' ' });
            line.code.push(if shown && !comment { *c } else { ' ' });
        }
        mode = next;
        at += taken;
    }
    if text.ends_with('\n') {
        lines.pop();
    }
    lines
}

/// How many characters belong together, what mode follows, and whether they are code.
fn step(rest: &[char], before: char, mode: Mode) -> (usize, Mode, bool) {
    let starts = |text: &str| text.chars().enumerate().all(|(at, c)| rest.get(at) == Some(&c));
    match mode {
        Mode::LineComment => (1, Mode::LineComment, false),
        Mode::BlockComment(depth) if starts("/*") => (2, Mode::BlockComment(depth + 1), false),
        Mode::BlockComment(depth) if starts("*/") => {
            (2, if depth == 0 { Mode::Code } else { Mode::BlockComment(depth - 1) }, false)
        }
        Mode::BlockComment(depth) => (1, Mode::BlockComment(depth), false),
        // An escaped line break stays a line break.
        Mode::Text(None) if rest[0] == '\\' && rest.get(1) != Some(&'\n') => {
            (2.min(rest.len()), Mode::Text(None), false)
        }
        Mode::Text(None) if rest[0] == '"' => (1, Mode::Code, true),
        Mode::Text(Some(hashes)) if starts(&format!("\"{}", "#".repeat(hashes))) => {
            (1 + hashes, Mode::Code, true)
        }
        Mode::Text(hashes) => (1, Mode::Text(hashes), false),
        Mode::Code if starts("//") => (2, Mode::LineComment, false),
        Mode::Code if starts("/*") => (2, Mode::BlockComment(0), false),
        Mode::Code if rest[0] == '"' => (1, Mode::Text(None), true),
        Mode::Code if rest[0] == '\'' => (character_length(rest), Mode::Code, false),
        Mode::Code if rest[0] == 'r' && !before.is_alphanumeric() && before != '_' || starts("br") => {
            raw_string(rest)
        }
        Mode::Code => (1, Mode::Code, true),
    }
}

/// Length of a character literal; 1 for the tick of a lifetime.
fn character_length(rest: &[char]) -> usize {
    match rest {
        ['\'', '\\', escaped @ ..] => {
            2 + escaped.iter().skip(1).position(|c| *c == '\'').map_or(0, |at| at + 2)
        }
        ['\'', _, '\'', ..] => 3,
        _ => 1,
    }
}

/// The opening of a raw string, or the single character when it is none.
fn raw_string(rest: &[char]) -> (usize, Mode, bool) {
    let prefix = if rest[0] == 'b' { 2 } else { 1 };
    let hashes = rest[prefix..].iter().take_while(|c| **c == '#').count();
    match rest.get(prefix + hashes) {
        Some('"') => (prefix + hashes + 1, Mode::Text(Some(hashes)), true),
        _ => (1, Mode::Code, true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_comments_and_quoted_text_are_told_apart() {
        let text =
            "let a = \"x // y\"; // z\nlet b = r#\"{ \" } \"#; /* p\nq */ let c = '\"';\nfn d<'a>() {}";
        let lines = split(text);
        assert_eq!(lines[0].code.trim_end(), "let a = \"      \";");
        assert_eq!(lines[0].comment.trim(), "// z");
        assert_eq!(lines[1].code.trim_end(), "let b = r#\"      \"#;");
        assert_eq!((lines[2].code.trim(), lines[2].comment.trim()), ("let c =    ;", "q */"));
        assert_eq!(lines[3].code.trim(), "fn d< a>() {}");
    }

    #[test]
    fn test_code_is_marked_in_place_and_in_files_of_its_own() {
        let repo = Repo::of(&[
            (
                "io/src/lib.rs",
                "mod a;\n#[cfg(test)]\nmod contract;\n#[cfg(test)]\nmod tests {\n    x\n}\nmod z;\n",
            ),
            ("io/src/contract/part.rs", "fn f() {}"),
            ("io/src/contract.rs", "fn f() {}"),
            ("io/src/a/tests.rs", "fn f() {}"),
            ("io/src/a.rs", "fn f() {}"),
        ]);
        let tests = |path: &str| -> Vec<bool> {
            let sources = sources(&repo);
            let source = sources.iter().find(|source| source.path == path).expect(path);
            source.lines.iter().map(|line| line.test).collect()
        };
        assert_eq!(tests("io/src/lib.rs"), [false, true, true, true, true, true, true, false]);
        assert_eq!(tests("io/src/contract/part.rs"), [true]);
        assert_eq!(tests("io/src/contract.rs"), [true]);
        assert_eq!(tests("io/src/a/tests.rs"), [true]);
        assert_eq!(tests("io/src/a.rs"), [false]);
    }
}
