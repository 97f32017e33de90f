//! The AWS profile: static credentials, region and endpoint from `~/.aws/credentials` and `~/.aws/config`.
//!
//! object_store reads the environment and asks instance, container and web identity endpoints, but knows no
//! profiles. This reads the named one (`AWS_PROFILE`, else `default`). Profiles that log in through SSO, assume a
//! role or run a program are not understood; naming one is an error, not a silent fall through.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_core::{Error, Result};

/// Profile keys and object_store's names for them.
const KNOWN: [(&str, &str); 5] = [
    ("aws_access_key_id", "aws_access_key_id"),
    ("aws_secret_access_key", "aws_secret_access_key"),
    ("aws_session_token", "aws_session_token"),
    ("region", "aws_region"),
    ("endpoint_url", "aws_endpoint"),
];

/// What the profile says, in object_store's names; `environment` has lower-case names.
pub(super) async fn values(environment: &[(String, String)]) -> Result<Vec<(String, String)>> {
    let variable =
        |name: &str| environment.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let named = variable("aws_profile");
    let home = || std::env::home_dir().map(|home| home.join(".aws"));
    let file = |name: &str, default: &str| {
        variable(name).map(PathBuf::from).or_else(|| home().map(|folder| folder.join(default)))
    };
    let credentials = read(file("aws_shared_credentials_file", "credentials")).await?;
    let config = read(file("aws_config_file", "config")).await?;
    let own_keys = variable("aws_access_key_id").is_some();
    select(named.as_deref(), own_keys, &credentials, &config)
}

async fn read(path: Option<PathBuf>) -> Result<String> {
    let Some(path) = path else { return Ok(String::new()) };
    match tokio::fs::read_to_string(Path::new(&path)).await {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(Error::from(error).context(path.display())),
    }
}

/// Picks the profile's values; credentials in the environment take precedence over the profile's.
fn select(
    named: Option<&str>,
    own_keys: bool,
    credentials: &str,
    config: &str,
) -> Result<Vec<(String, String)>> {
    let name = named.unwrap_or("default");
    let section = if name == "default" { "default".to_owned() } else { format!("profile {name}") };
    let (from_config, from_credentials) = (parse(config, &section), parse(credentials, name));
    if named.is_some() && from_config.is_none() && from_credentials.is_none() {
        return Err(Error::invalid(format!("AWS profile `{name}` does not exist"))
            .with_hint("look into ~/.aws/credentials and ~/.aws/config, or unset AWS_PROFILE"));
    }
    let mut found = from_config.unwrap_or_default();
    found.extend(from_credentials.unwrap_or_default());
    if named.is_some() && !own_keys && !found.contains_key("aws_access_key_id") {
        return Err(Error::invalid(format!("AWS profile `{name}` has no aws_access_key_id")).with_hint(
            "profiles with SSO, roles or a credential process are not understood: export their keys first \
             (aws configure export-credentials --format env)",
        ));
    }
    let wanted = KNOWN.iter().filter(|(key, _)| !own_keys || !key.starts_with("aws_"));
    Ok(wanted.filter_map(|(key, name)| Some(((*name).to_owned(), found.get(*key)?.clone()))).collect())
}

/// The keys of one section; `None` when there is no such section.
fn parse(text: &str, wanted: &str) -> Option<BTreeMap<String, String>> {
    let mut found = None;
    let mut inside = false;
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            inside = name.split_whitespace().eq(wanted.split_whitespace());
            if inside {
                found.get_or_insert_with(BTreeMap::new);
            }
        } else if let (true, Some((key, value))) = (inside, line.split_once('=')) {
            let section = found.get_or_insert_with(BTreeMap::new);
            section.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "[default]\naws_access_key_id = A\naws_secret_access_key=S\n# x = y\n[lab]\n\
        aws_access_key_id = L\naws_secret_access_key = M\naws_session_token = T";
    const CONFIG: &str = "[default]\nregion = eu-west-1\n[profile lab]\nregion=us-east-2\n\
        endpoint_url = http://lab:9000\n[profile sso]\nsso_start_url = x";

    fn check(named: Option<&str>, own_keys: bool, wanted: &[(&str, &str)]) {
        let mut found = select(named, own_keys, CREDENTIALS, CONFIG).expect("profile");
        found.sort();
        let found: Vec<_> = found.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(found, wanted, "{named:?}");
    }

    #[test]
    fn a_profile_gives_keys_region_and_endpoint() {
        check(
            None,
            false,
            &[("aws_access_key_id", "A"), ("aws_region", "eu-west-1"), ("aws_secret_access_key", "S")],
        );
        check(
            Some("lab"),
            false,
            &[
                ("aws_access_key_id", "L"),
                ("aws_endpoint", "http://lab:9000"),
                ("aws_region", "us-east-2"),
                ("aws_secret_access_key", "M"),
                ("aws_session_token", "T"),
            ],
        );
        check(Some("sso"), true, &[]);
        check(None, true, &[("aws_region", "eu-west-1")]);
    }

    #[test]
    fn a_named_profile_must_exist_and_be_understood() {
        for name in ["none", "sso"] {
            let error = select(Some(name), false, CREDENTIALS, CONFIG).expect_err(name);
            assert!(error.message().contains(name) && error.hint().is_some(), "{error}");
        }
        assert!(select(None, false, "", "").expect("no files are fine").is_empty());
    }
}
