//! A folder of files as people have them: all sizes, odd names, deep paths.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use forebay_core::BLOCK_SIZE;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::settings::repository;

/// Which names a sample may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// Those that an object key can spell.
    Keys,
    /// Whatever a file system takes: bytes that are not UTF-8, empty folders, links, modes.
    Any,
}

/// File sizes around the edges that matter: pages, the largest inline read, blocks.
const SIZES: &[u64] = &[0, 1, 511, 4096, 4097, 131_073, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 3];

/// Names that break careless code and are object keys all the same.
const NAMES: &[&str] = &[
    "with space",
    "plus+and&equals=",
    "percent%20twenty",
    "quotes'\"`",
    "-leading-dash",
    ".hidden",
    "trailing.",
    "hash#question?",
    "üñí-日本語-🦀",
    "paren(theses)[brackets]{braces}",
    "comma,semicolon;colon:",
];

/// Bytes that follow from the generator's state. By an optimised crate: made by the generator, which is compiled into each
/// test, they took two thirds of the processor time of the crash suite.
pub fn noise(rng: &mut impl Rng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    blake3::Hasher::new().update(&rng.next_u64().to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Fills `root` with a tree whose bytes are the same on every call.
pub fn sample_tree(root: &Path, names: Names) {
    let mut rng = SmallRng::seed_from_u64(1);
    let mut write = |path: &Path, size: u64| {
        let bytes = noise(&mut rng, size as usize);
        fs::create_dir_all(path.parent().expect("files lie in folders")).expect("folder");
        fs::write(path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    };
    for size in SIZES {
        write(&root.join(format!("sizes/{size}")), *size);
    }
    for (index, name) in NAMES.iter().enumerate() {
        write(&root.join("names").join(name), 100 + index as u64);
        write(&root.join(name).join("inner"), 50 + index as u64);
    }
    for index in 0..200 {
        write(&root.join(format!("many/file-{index:03}")), index * 17);
    }
    write(&root.join("a/b/c/d/e/f/g/h/deep"), 1000);
    write(&root.join("names").join("n".repeat(255)), 3);
    let text = repository().join("tests/src");
    fs::create_dir_all(root.join("text")).expect("folder");
    for entry in fs::read_dir(text).expect("sources").map(|entry| entry.expect("entry")) {
        if entry.file_type().expect("type").is_file() {
            fs::copy(entry.path(), root.join("text").join(entry.file_name())).expect("copy");
        }
    }
    if names == Names::Any {
        beyond_keys(root);
    }
}

/// What only a file system holds.
fn beyond_keys(root: &Path) {
    let odd = root.join("odd");
    fs::create_dir_all(odd.join("empty/nested-empty")).expect("folders");
    for name in [&b"not-utf8-\xff\xfe"[..], b"new\nline", b"back\\slash", b"tab\there"] {
        fs::write(odd.join(OsStr::from_bytes(name)), name).expect("odd name");
    }
    fs::write(odd.join("script"), "#!/bin/sh\n").expect("script");
    fs::set_permissions(odd.join("script"), fs::Permissions::from_mode(0o755)).expect("mode");
    fs::write(odd.join("private"), "secret").expect("private");
    fs::set_permissions(odd.join("private"), fs::Permissions::from_mode(0o600)).expect("mode");
    fs::hard_link(odd.join("script"), odd.join("second-name")).expect("hard link");
    symlink("script", odd.join("relative-link")).expect("symlink");
    symlink("/nowhere/at/all", odd.join("dangling-link")).expect("symlink");
}
