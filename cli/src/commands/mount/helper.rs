//! `mount.forebay`: what mount(8) runs for a file system of type `forebay`, from fstab or by hand.

use std::ffi::OsString;
use std::path::Path;

/// Whether the program was started under the helper's name.
pub(crate) fn is_helper(words: &[OsString]) -> bool {
    words.first().map(Path::new).and_then(Path::file_name).is_some_and(|name| name == "mount.forebay")
}

/// The command line of `forebay mount` that says what mount(8)'s says: `SOURCE DIRECTORY [-sfnv] [-N NAMESPACE]
/// [-o OPTIONS] [-t TYPE]`. `-f` (do everything but mount) becomes an option of ours; the others mean nothing here.
pub(crate) fn helper_arguments(words: &[OsString]) -> Vec<OsString> {
    let mut ours: Vec<OsString> = vec!["forebay".into(), "mount".into()];
    let mut rest = words.iter().skip(1);
    while let Some(word) = rest.next() {
        match word.to_string_lossy().as_ref() {
            "-N" | "-t" => _ = rest.next(),
            "-o" => ours.extend([word.clone()].into_iter().chain(rest.next().cloned())),
            flags
                if flags.starts_with('-')
                    && flags.len() > 1
                    && flags[1..].chars().all(|c| "sfnv".contains(c)) =>
            {
                if flags.contains('f') {
                    ours.extend(["-o".into(), "fake".into()]);
                }
            }
            _ => ours.push(word.clone()),
        }
    }
    ours
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn the_helper_is_known_by_its_name() {
        assert!(is_helper(&words("/sbin/mount.forebay s3://b /mnt")));
        assert!(!is_helper(&words("/usr/bin/forebay mount")));
    }

    #[test]
    fn what_mount_says_becomes_our_command_line() {
        for (theirs, ours) in [
            ("mount.forebay s3://b/p /mnt -o rw,_netdev", "forebay mount s3://b/p /mnt -o rw,_netdev"),
            ("mount.forebay s3://b /mnt -sv -o ro -t forebay -N ns", "forebay mount s3://b /mnt -o ro"),
            ("mount.forebay s3://b /mnt -f", "forebay mount s3://b /mnt -o fake"),
        ] {
            assert_eq!(helper_arguments(&words(theirs)), words(ours), "{theirs}");
        }
    }
}
