//! Text that is to be pasted into a shell.

use std::borrow::Cow;
use std::path::Path;

/// A path as one word of a POSIX shell.
pub fn quoted(path: &Path) -> String {
    let text: Cow<'_, str> = path.to_string_lossy();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+:,@%=".contains(&byte);
    match !text.is_empty() && text.bytes().all(is_plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_shell_would_take_apart_is_quoted() {
        for (path, expected) in [
            ("/mnt/data-1", "/mnt/data-1"),
            ("/mnt/my data", "'/mnt/my data'"),
            ("a'b", "'a'\\''b'"),
            ("$HOME", "'$HOME'"),
            ("", "''"),
        ] {
            assert_eq!(quoted(Path::new(path)), expected);
        }
    }
}
