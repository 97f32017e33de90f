//! Checks over Cargo.toml files: who may depend on whom, and who owns which heavy dependency.

use super::{Finding, Repo};

/// Layers, bottom-up. A package may depend on packages of earlier layers only; those of one layer never meet.
const LAYERS: &[&[&str]] = &[
    &["core"],
    &["io"],
    &["metadata", "cache"],
    &["volume"],
    &["fuse", "ckpt"],
    &["cli", "python", "bench", "tests"],
];

/// Dependencies that only these packages may ship. A test elsewhere may name one to build a double of it.
const OWNERS: &[(&str, &[&str])] = &[
    ("anyhow", &["cli", "python", "bench", "tests"]),
    ("aws-config", &["io"]),
    ("clap", &["cli", "bench"]),
    ("foyer", &["cache"]),
    ("fuser", &["fuse"]),
    ("heed", &["metadata"]),
    ("io-uring", &["io"]),
    ("memmap2", &["io"]),
    ("object_store", &["io", "bench"]), // bench measures against it
    ("pyo3", &["python"]),
    ("quinn", &["io"]),
    ("reqwest", &["io"]),
    ("sideway", &["io"]),
    ("slatedb", &["metadata"]),
    ("zstd", &["io", "python"]), // python names its features, for tests: `alike`
];

/// Edges that do not go strictly down.
pub(super) fn edges(repo: &Repo) -> Vec<Finding> {
    check(repo, &["dependencies", "build-dependencies", "dev-dependencies"], |package, dependency| {
        let dependency = dependency.strip_prefix("forebay-")?;
        match (layer(package), layer(dependency)) {
            (Some(from), Some(to)) if to < from => None,
            (None, _) => Some(format!("package `{package}` has no layer: add it to LAYERS")),
            (_, None) => Some(format!("`forebay-{dependency}` has no layer: add it to LAYERS")),
            _ => Some(format!("`{package}` may not depend on `{dependency}`: edges go strictly down")),
        }
    })
}

/// Heavy dependencies outside the packages that own them.
pub(super) fn owners(repo: &Repo) -> Vec<Finding> {
    check(repo, &["dependencies", "build-dependencies"], |package, dependency| {
        let (_, owners) = OWNERS.iter().find(|(name, _)| *name == dependency)?;
        let owned = owners.contains(&package);
        (!owned).then(|| format!("`{dependency}` belongs to {owners:?}, not to `{package}`"))
    })
}

fn layer(package: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&package))
}

/// Applies `rule` to each (package, dependency) pair, of these kinds, of every package below the root.
fn check(repo: &Repo, kinds: &[&str], rule: impl Fn(&str, &str) -> Option<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in repo.files() {
        let Some(package) = path.strip_suffix("/Cargo.toml") else { continue };
        let finding = |message| Finding { file: path.to_owned(), line: 0, message };
        let manifest: toml::Table = match text.parse() {
            Ok(manifest) => manifest,
            Err(error) => {
                findings.push(finding(format!("does not parse: {error}")));
                continue;
            }
        };
        let targets = manifest.get("target").and_then(toml::Value::as_table);
        let targets = targets.into_iter().flat_map(toml::Table::values).filter_map(toml::Value::as_table);
        for table in targets.chain([&manifest]) {
            for kind in kinds {
                let named = table.get(*kind).and_then(toml::Value::as_table).into_iter().flatten();
                findings.extend(named.filter_map(|(name, _)| rule(package, name)).map(finding));
            }
        }
    }
    findings
}
