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
    /// Reads the file that `--config` names, which must exist, or the default one, which need not.
    pub(crate) fn load(global: &Global) -> Result<Self> {
        let path = global.config.clone().unwrap_or_else(places::config);
        match std::fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text, &path),
            Err(error) if error.kind() == Io::NotFound && global.config.is_none() => Ok(Self::default()),
            Err(error) => Err(Error::from(error)
                .context(format!("cannot read the configuration {}", path.display()))
                .with_hint("check the path given with --config")),
        }
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self> {
        toml::from_str(text).map_err(|error| {
            Error::invalid(format!("configuration {}: {}", path.display(), error.message()))
                .with_hint("docs/configuration.md lists every setting")
        })
    }
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
}
