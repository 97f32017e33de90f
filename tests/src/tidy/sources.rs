//! Checks over Rust sources.

use super::scan::{Source, item_end, sources};
use super::{Finding, Repo};

/// Lines of a file, test code not counted.
const FILE_LINES: usize = 600;
/// Lines of a function, from `fn` to its closing brace.
const FUNCTION_LINES: usize = 70;

/// Where `unsafe` may stand: a kernel, a device or a foreign library is touched there (STYLE 19).
const UNSAFE_PATHS: &[&str] = &[
    "io/src/mem",
    "io/src/disk",
    "io/src/net",
    "io/src/device",
    "fuse/src/transport",
    "metadata/src/kv/lmdb", // opening a memory map is unsafe in heed: see docs/decisions/0002
    "python/src/buffer",
    "python/src/device",
    "python/src/workers",
];

/// Files longer than a reader takes in.
pub(super) fn file_lengths(repo: &Repo) -> Vec<Finding> {
    let long = |source: &Source<'_>| {
        let length = source.shipped().count();
        (length > FILE_LINES).then(|| format!("{length} lines without tests: split at {FILE_LINES}"))
    };
    let finding = |source: &Source<'_>| long(source).map(|message| at(source, 0, message));
    sources(repo).iter().filter_map(finding).collect()
}

/// Functions that do not fit a screen.
pub(super) fn function_lengths(repo: &Repo) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources(repo) {
        for (number, line) in source.numbered() {
            let words: Vec<&str> = line.code.split_whitespace().collect();
            let Some(name) = words.iter().position(|word| *word == "fn").and_then(|at| words.get(at + 1))
            else {
                continue;
            };
            let length = item_end(&source.lines, number - 1) + 2 - number;
            if length > FUNCTION_LINES {
                let name = name.split(['(', '<']).next().unwrap_or(name);
                let message = format!("fn {name} has {length} lines: split at {FUNCTION_LINES}");
                findings.push(at(&source, number, message));
            }
        }
    }
    findings
}

/// Modules that do not say what they own.
pub(super) fn module_docs(repo: &Repo) -> Vec<Finding> {
    let bare = |source: &Source<'_>| {
        let mut content = source.lines.iter().filter(|line| {
            let empty = line.code.trim().is_empty() && line.comment.trim().is_empty();
            !empty && !line.code.starts_with("#!")
        });
        !content.next().is_some_and(|line| line.comment.starts_with("//!"))
    };
    let message = "starts without `//!`: say what the module owns, promises, and does not do";
    sources(repo).iter().filter(|source| bare(source)).map(|source| at(source, 1, message.into())).collect()
}

/// Work that was left for later, tests that are switched off.
pub(super) fn leftovers(repo: &Repo) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources(repo) {
        for (number, line) in source.numbered() {
            let code = ["todo!", "unimplemented!", "dbg!", "#[ignore"].into_iter();
            let code = code.filter(|left| line.code.contains(left));
            let words = |left: &&str| line.comment.split(|c: char| !c.is_alphanumeric()).any(|w| w == *left);
            let comments = ["FIXME", "XXX", "HACK"].into_iter().filter(words);
            findings
                .extend(code.chain(comments).map(|left| at(&source, number, format!("leftover `{left}`"))));
        }
    }
    findings
}

/// `.unwrap()` in shipped code.
pub(super) fn unwraps(repo: &Repo) -> Vec<Finding> {
    in_shipped_code(repo, |_, code| {
        let message = "`.unwrap()` outside tests: return the error, or `expect` why it cannot fail";
        code.contains(".unwrap()").then(|| message.into())
    })
}

/// `unsafe` outside the files that touch a kernel, a device or a foreign library.
pub(super) fn unsafe_code(repo: &Repo) -> Vec<Finding> {
    in_shipped_code(repo, |path, code| {
        let used = code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe");
        let allowed = UNSAFE_PATHS.iter().any(|allowed| path.starts_with(allowed));
        (used && !allowed).then(|| format!("`unsafe` outside {UNSAFE_PATHS:?}"))
    })
}

/// Key-value engines named outside the one module that adapts them.
pub(super) fn engines(repo: &Repo) -> Vec<Finding> {
    in_shipped_code(repo, |path, code| {
        let named = ["slatedb::", "heed::"].into_iter().find(|engine| {
            code.match_indices(engine).any(|(at, _)| {
                // A module of ours that has the engine's name is reached through a path.
                !code[..at].ends_with("::")
                    && !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
            })
        });
        let named = named.filter(|_| !path.starts_with("metadata/src/kv"));
        named.map(|engine| format!("`{engine}` outside metadata/src/kv"))
    })
}

fn in_shipped_code(repo: &Repo, rule: impl Fn(&str, &str) -> Option<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources(repo) {
        let broken = source.shipped().filter_map(|(number, line)| {
            rule(source.path, &line.code).map(|message| at(&source, number, message))
        });
        findings.extend(broken);
    }
    findings
}

fn at(source: &Source<'_>, line: usize, message: String) -> Finding {
    Finding { file: source.path.to_owned(), line, message }
}
