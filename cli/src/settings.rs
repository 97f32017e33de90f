//! The configuration file: defaults for what command lines can say.

use std::io::ErrorKind as Io;
use std::path::Path;

use forebay_core::{Error, Result};
use forebay_volume::VolumeSettings;
use serde::Deserialize;

use crate::arguments::Global;
use crate::places;

/// `forebay.toml`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Settings {
    /// What to log, as `--log`.
    pub(crate) log: Option<String>,
    /// What every volume is opened with.
    pub(crate) volume: VolumeSettings,
    /// What every mount is made with.
    pub(crate) mount: MountSettings,
}

/// Defaults of `forebay mount`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct MountSettings {
    /// Let users other than the one who mounts look in. Default false.
    pub(crate) allow_other: bool,
    /// Seconds for which the kernel may use names and attributes. Default 1, and a day for `--dataset`.
    pub(crate) ttl_seconds: Option<f64>,
    /// Keep track of when files are read. Default false.
    pub(crate) relatime: bool,
    /// Threads that take requests from the kernel. Default one a core, at least 8 and at most 32:
    /// some may wait for a disk.
    pub(crate) threads: Option<usize>,
}

impl Settings {
    /// Reads the file that `--config` names, which must exist, or the default one, which need not; what every command takes
    /// besides counts more.
    pub(crate) fn load(global: &Global) -> Result<Self> {
        let mut settings = Self::read(global)?;
        settings.volume.store.anonymous |= global.anonymous;
        Ok(settings)
    }

    fn read(global: &Global) -> Result<Self> {
        let path = global.config.clone().unwrap_or_else(places::config);
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                let mut settings = Self::parse(&text, &path)?;
                let file = std::path::absolute(&path)?;
                settings.resolve(file.parent().unwrap_or(Path::new("/")));
                Ok(settings)
            }
            Err(error) if error.kind() == Io::NotFound && global.config.is_none() => Ok(Self::default()),
            Err(error) => Err(Error::from(error)
                .context(format!("cannot read the configuration {}", path.display()))
                .with_hint("check the path given with --config")),
        }
    }

    /// Takes paths to be meant from `directory`, that of the file: who serves a mount works in another one than who reads it.
    fn resolve(&mut self, directory: &Path) {
        let VolumeSettings { state_directory, cache, join, .. } = &mut self.volume;
        let optional = [&mut cache.directory, &mut cache.peers.secret, &mut join.secret];
        for path in optional.into_iter().flatten().chain([state_directory]) {
            if !path.as_os_str().is_empty() {
                *path = directory.join(&path);
            }
        }
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self> {
        toml::from_str(text).map_err(|error| refused(error, text, path))
    }
}

/// Says which setting of the file is wrong, and where it stands.
fn refused(mut error: toml::de::Error, text: &str, path: &Path) -> Error {
    let mut place = format!("configuration {}", path.display());
    if let Some(span) = error.span() {
        let before = text.as_bytes().get(..span.start).unwrap_or(text.as_bytes());
        place += &format!(", line {}", before.iter().filter(|byte| **byte == b'\n').count() + 1);
    }
    let message = error.message().to_owned();
    // The path of the setting is told where there is no text to show instead, on a line of its own.
    error.set_input(None);
    let shown = error.to_string();
    let setting = shown.lines().last().and_then(|line| line.strip_prefix("in `")?.strip_suffix('`'));
    let setting = setting.map(|setting| format!("{setting}: ")).unwrap_or_default();
    let is_mode = message.ends_with("no mode");
    let is_text_for_number = message.starts_with("invalid type: string")
        && matches!(message.rsplit(' ').next(), Some("u16" | "u32" | "u64" | "usize" | "f64"));
    let hint = match is_text_for_number || is_mode {
        true => {
            "numbers are digits without quotes: sizes are in bytes (5368709120, not \"5GiB\"), modes as in 0o644"
        }
        false => "docs/configuration.md lists every setting",
    };
    Error::invalid(format!("{place}: {setting}{message}")).with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_is_all_defaults_and_an_unknown_setting_is_named() {
        let path = Path::new("/x.toml");
        assert!(!Settings::parse("", path).expect("empty").mount.allow_other);
        assert_eq!(
            Settings::parse("[mount]\nttl_seconds = 2.5", path).expect("ttl").mount.ttl_seconds,
            Some(2.5)
        );
        let failure = Settings::parse("[mount]\nttl = 1", path).expect_err("unknown");
        assert!(failure.message().contains("ttl"), "{failure}");
    }

    #[test]
    fn paths_are_meant_from_where_the_file_is() {
        let text = "[volume]\nstate_directory = 'state'\n[volume.cache]\ndirectory = '/nvme'\n[volume.join]\nsecret = 'a/secret'";
        let mut settings = Settings::parse(text, Path::new("x.toml")).expect("settings");
        settings.resolve(Path::new("/etc/forebay"));
        let volume = &settings.volume;
        assert_eq!(volume.state_directory, Path::new("/etc/forebay/state"));
        assert_eq!(volume.cache.directory.as_deref(), Some(Path::new("/nvme")));
        assert_eq!(volume.join.secret.as_deref(), Some(Path::new("/etc/forebay/a/secret")));
        let mut settings = Settings::default();
        let before = settings.volume.state_directory.clone();
        settings.resolve(Path::new("/etc/forebay"));
        assert_eq!(settings.volume.state_directory, before, "what is not given has its own default");
    }

    #[test]
    fn a_wrong_value_is_told_with_its_setting_and_its_line() {
        for (text, message, hint) in [
            (
                "log = 'info'\n[volume.cache]\ndisk_bytes = '5GiB'\n",
                "configuration /x.toml, line 3: volume.cache.disk_bytes: invalid type: string \"5GiB\", expected u64",
                "sizes are in bytes",
            ),
            (
                "[volume]\nimport = { file_mode = '0644' }",
                "line 2: volume.import.file_mode: invalid type",
                "0o644",
            ),
            (
                "[volume.import]\nfile_mode = 644",
                "line 2: volume.import.file_mode: 644 is 0o1204: no mode",
                "0o644",
            ),
            (
                "volume.store.max_in_flight = 'many'",
                "line 1: volume.store.max_in_flight: invalid type",
                "digits",
            ),
            (
                "[volume.gc]\n\ninterval_ms = -1",
                "line 3: volume.gc.interval_ms: invalid value: integer `-1`",
                "docs/",
            ),
            ("[mount]\nallow_other = 'yes'", "line 2: mount.allow_other: invalid type: string", "docs/"),
            ("[volume.cache]\nsize = 1", "line 2: volume.cache: unknown field `size`", "docs/"),
            ("\n[volume", "line 2: unclosed table", "docs/"),
            ("[mount]\nrelatime = true\nrelatime = true", "line 3: ", "docs/"),
        ] {
            let failure = Settings::parse(text, Path::new("/x.toml")).expect_err(text);
            assert!(failure.message().contains(message), "{failure}");
            assert!(failure.hint().expect("a hint").contains(hint), "{failure}: {:?}", failure.hint());
        }
    }
}
