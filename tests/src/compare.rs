//! Two trees, name by name and byte by byte.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// Fails with the first differences unless both trees hold the same names, kinds, link targets and bytes.
///
/// Modes are compared when `modes` is set: objects that nobody wrote through a mount have none of their own.
#[track_caller]
pub fn assert_same_trees(expected: &Path, got: &Path, modes: bool) {
    if let Some(shown) = differences(expected, got, modes) {
        panic!("{shown}");
    }
}

/// What tells both trees apart, in words.
pub fn differences(expected: &Path, got: &Path, modes: bool) -> Option<String> {
    let mut differences = Vec::new();
    compare(expected, got, modes, &mut differences);
    let shown = differences.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    (!differences.is_empty()).then(|| format!("{} differences:\n{shown}", differences.len()))
}

fn compare(expected: &Path, got: &Path, modes: bool, differences: &mut Vec<String>) {
    if let Some(difference) = difference(expected, got, modes).unwrap_or_else(|error| Some(error.to_string()))
    {
        differences.push(format!("{}: {difference}", got.display()));
        return;
    }
    if !fs::symlink_metadata(expected).is_ok_and(|meta| meta.is_dir()) {
        return;
    }
    match (names(expected), names(got)) {
        (Ok(left), Ok(right)) => {
            for name in left.symmetric_difference(&right) {
                let side = if left.contains(name) { "missing" } else { "unexpected" };
                differences.push(format!("{}: {side}", got.join(name).display()));
            }
            for name in left.intersection(&right) {
                compare(&expected.join(name), &got.join(name), modes, differences);
            }
        }
        (Err(error), _) | (_, Err(error)) => differences.push(format!("{}: {error}", got.display())),
    }
}

fn names(folder: &Path) -> io::Result<BTreeSet<OsString>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name())).collect()
}

/// What tells two entries apart, their entries left out.
fn difference(expected: &Path, got: &Path, modes: bool) -> io::Result<Option<String>> {
    let (left, right) = (fs::symlink_metadata(expected)?, fs::symlink_metadata(got)?);
    if left.file_type() != right.file_type() {
        return Ok(Some(format!("is a {:?}, expected {:?}", right.file_type(), left.file_type())));
    }
    if modes && !left.is_symlink() && left.mode() != right.mode() {
        return Ok(Some(format!("mode {:o}, expected {:o}", right.mode(), left.mode())));
    }
    if left.is_symlink() && fs::read_link(expected)? != fs::read_link(got)? {
        return Ok(Some(format!("links to {:?}", fs::read_link(got)?)));
    }
    if !left.is_file() {
        return Ok(None);
    }
    if left.len() != right.len() {
        return Ok(Some(format!("{} bytes, expected {}", right.len(), left.len())));
    }
    Ok(first_difference(&File::open(expected)?, &File::open(got)?, left.len())?
        .map(|offset| format!("differs from byte {offset} of {} on", left.len())))
}

/// Offset of the first byte that differs; also reads at the end of `got`, where nothing may follow.
fn first_difference(expected: &File, mut got: &File, size: u64) -> io::Result<Option<u64>> {
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut offset = 0;
    while offset < size {
        let length = (size - offset).min(left.len() as u64) as usize;
        expected.read_exact_at(&mut left[..length], offset)?;
        got.read_exact(&mut right[..length])?;
        if left[..length] != right[..length] {
            let at = (0..length).find(|&at| left[at] != right[at]).expect("the slices differ");
            return Ok(Some(offset + at as u64));
        }
        offset += length as u64;
    }
    let beyond = got.read(&mut right)?;
    Ok((beyond > 0).then_some(size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Names, Scratch, sample_tree};

    #[test]
    fn every_kind_of_difference_is_found() {
        let scratch = Scratch::new();
        let (left, right) = (scratch.folder("left"), scratch.folder("right"));
        sample_tree(&left, Names::Any);
        sample_tree(&right, Names::Any);
        assert_same_trees(&left, &right, true);
        let found = |change: &dyn Fn()| {
            change();
            let mut differences = Vec::new();
            compare(&left, &right, true, &mut differences);
            assert_eq!(differences.len(), 1, "{differences:?}");
            differences.remove(0)
        };
        let odd = right.join("odd");
        assert!(found(&|| fs::write(odd.join("new"), "").unwrap()).ends_with("odd/new: unexpected"));
        fs::remove_file(odd.join("new")).unwrap();
        assert!(found(&|| fs::remove_dir(odd.join("empty/nested-empty")).unwrap()).ends_with("missing"));
        fs::create_dir(odd.join("empty/nested-empty")).unwrap();
        let size = "131073";
        let file = File::options().write(true).open(right.join("sizes").join(size)).unwrap();
        let before = fs::read(right.join("sizes").join(size)).unwrap()[131_072];
        let message = found(&|| file.write_all_at(&[!before], 131_072).unwrap());
        assert!(message.ends_with("differs from byte 131072 of 131073 on"), "{message}");
    }
}
