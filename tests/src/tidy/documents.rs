//! Checks over documents: what they promise is shown by a test, what the code names is listed.

use super::{Finding, Repo};

/// Words that no file may hold: a developer's home, a registry's host. Spelled in halves to keep this file clean.
const BANNED: &[&str] = &[
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("pypi", ".org"),
    concat!("python", "hosted"),
    concat!("crates", ".io"),
    concat!("proxy.gol", "ang"),
];

/// Absolute home paths and registry hosts, in any file but the lock file.
pub(super) fn words(repo: &Repo) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in repo.files().filter(|(path, _)| !path.ends_with(".lock")) {
        for (index, line) in text.lines().enumerate() {
            let banned = BANNED.iter().filter(|word| line.contains(**word));
            findings.extend(banned.map(|word| at(path, index + 1, format!("`{word}` may not appear"))));
        }
    }
    findings
}

/// Metric names in a `metrics.rs` that docs/metrics.md does not list.
pub(super) fn metrics(repo: &Repo) -> Vec<Finding> {
    let listed = repo.text("docs/metrics.md").unwrap_or_default();
    let mut findings = Vec::new();
    for (path, text) in repo.files().filter(|(path, _)| path.ends_with("/metrics.rs")) {
        for (index, line) in text.lines().enumerate() {
            for name in line.split('"').skip(1).step_by(2).filter(|name| name.starts_with("forebay_")) {
                if !listed.contains(&format!("`{name}`")) {
                    findings.push(at(path, index + 1, format!("`{name}` is not in docs/metrics.md")));
                }
            }
        }
    }
    findings
}

/// Promises in docs/semantics.md (`**S1.** text`) that no test quotes, and quotes that are in no promise.
///
/// A test quotes with a comment `Promise S1: words of the promise`, word for word, on one or more comment lines
/// up to the full stop.
pub(super) fn semantics(repo: &Repo) -> Vec<Finding> {
    const FILE: &str = "docs/semantics.md";
    let promises = promises(repo.text(FILE).unwrap_or_default());
    let tests = repo.files().filter(|(path, _)| path.ends_with(".rs") || path.ends_with(".py"));
    let quotes: Vec<_> = tests.flat_map(|(path, text)| quotes(path, text)).collect();
    let mut findings = Vec::new();
    for (line, id, _) in &promises {
        if !quotes.iter().any(|quote| quote.id == *id) {
            findings.push(at(FILE, *line, format!("no test quotes promise {id}")));
        }
    }
    for quote in quotes {
        let kept = |(_, id, text): &(usize, String, String)| *id == quote.id && text.contains(&quote.words);
        if quote.words.is_empty() || !promises.iter().any(kept) {
            let message = format!("{FILE} has no promise {} with the words `{}`", quote.id, quote.words);
            findings.push(at(quote.path, quote.line, message));
        }
    }
    findings
}

/// (line, id, text) of each numbered promise; the text has single spaces.
fn promises(text: &str) -> Vec<(usize, String, String)> {
    let mut found: Vec<(usize, String, String)> = Vec::new();
    let mut open = false;
    for (index, line) in text.lines().enumerate() {
        if let Some((id, rest)) = line.strip_prefix("**S").and_then(|line| line.split_once(".**")) {
            found.push((index + 1, format!("S{id}"), squeeze(rest)));
            open = true;
        } else if line.trim().is_empty() {
            open = false;
        } else if let Some((_, _, text)) = found.last_mut().filter(|_| open) {
            *text = squeeze(&format!("{text} {line}"));
        }
    }
    found
}

struct Quote<'a> {
    path: &'a str,
    line: usize,
    id: String,
    words: String,
}

/// Comments `Promise S<number>: words.` in a test file.
fn quotes<'a>(path: &'a str, text: &str) -> Vec<Quote<'a>> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let comment = |line: &'_ str| -> Option<String> {
        let body = match path.ends_with(".py") {
            true => line.strip_prefix('#'),
            false => line.strip_prefix("///").or(line.strip_prefix("//")),
        };
        body.map(|body| body.trim().to_owned())
    };
    let mut found = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let body = comment(line);
        let Some((id, first)) =
            body.as_deref().and_then(|body| body.strip_prefix("Promise S")?.split_once(':'))
        else {
            continue;
        };
        let mut words = first.to_owned();
        for more in lines[index + 1..].iter().map_while(|line| comment(line)) {
            if words.trim_end().ends_with('.') || more.starts_with("Promise S") {
                break;
            }
            words = format!("{words} {more}");
        }
        found.push(Quote { path, line: index + 1, id: format!("S{id}"), words: squeeze(&words) });
    }
    found
}

/// Rows of docs/promises.md that are not `| promise | shown by | holds, partly: why, or not |`.
///
/// What holds, even partly, names in backquotes each test (`file::function`) or command (`make target`) that shows it,
/// and these exist. What does not hold is shown by `-`. Nothing is promised twice, by rows that begin alike and name one test.
pub(super) fn promise_table(repo: &Repo) -> Vec<Finding> {
    const FILE: &str = "docs/promises.md";
    let text = repo.text(FILE).unwrap_or_default();
    let rows = text.lines().enumerate().filter(|(_, line)| line.starts_with('|'));
    let body = rows.filter(|(_, line)| !line.starts_with("| promise |") && !line.starts_with("|---"));
    let mut seen = Vec::new();
    let faults = body.filter_map(|(index, line)| {
        let fault = row_fault(repo, line).or_else(|| twice_fault(line, &mut seen));
        fault.map(|fault| at(FILE, index + 1, fault))
    });
    faults.collect()
}

/// A row that says what one of those `seen` says, as merges of two changes of it leave them.
fn twice_fault<'a>(row: &'a str, seen: &mut Vec<(&'a str, Vec<&'a str>)>) -> Option<String> {
    let begins = &row[..row.floor_char_boundary(22)];
    let names: Vec<&str> = row.split('`').filter(|name| name.contains("::")).collect();
    let is_said = |(other, others): &(&str, Vec<&str>)| {
        *other == begins && others.iter().any(|name| names.contains(name))
    };
    let fault = seen.iter().any(is_said).then(|| "another row promises the same".into());
    seen.push((begins, names));
    fault
}

fn row_fault(repo: &Repo, row: &str) -> Option<String> {
    let cells: Vec<&str> = row.trim().trim_matches('|').split('|').map(str::trim).collect();
    let [promise, shown, state] = cells[..] else {
        return Some(format!("a row has 3 cells, this one {}", cells.len()));
    };
    let names: Vec<&str> = shown.split('`').skip(1).step_by(2).collect();
    let partly = state.strip_prefix("partly: ").is_some_and(|why| !why.is_empty());
    if promise.is_empty() {
        return Some("the promise is empty".into());
    }
    if state == "not" {
        return (shown != "-").then(|| "what does not hold is shown by `-`".into());
    }
    if state != "holds" && !partly {
        return Some(format!("`{state}` is none of `holds`, `partly: why`, `not`"));
    }
    if names.is_empty() {
        return Some("nothing is named that shows it".into());
    }
    names.into_iter().find(|name| !exists(repo, name)).map(|name| format!("`{name}` does not exist"))
}

/// Whether `file::function` or `make target` is there.
fn exists(repo: &Repo, name: &str) -> bool {
    if let Some(target) = name.strip_prefix("make ") {
        let rules = repo.text("Makefile").unwrap_or_default();
        return rules.lines().any(|line| line.starts_with(&format!("{target}:")));
    }
    let Some((file, function)) = name.split_once("::") else { return false };
    let text = repo.text(file).unwrap_or_default();
    text.contains(&format!("fn {function}(")) || text.contains(&format!("def {function}("))
}

fn squeeze(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn at(file: &str, line: usize, message: String) -> Finding {
    Finding { file: file.to_owned(), line, message }
}
