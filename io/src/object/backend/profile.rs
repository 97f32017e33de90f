//! The AWS profile: static credentials, region and endpoint from `~/.aws/credentials` and `~/.aws/config`.
//!
//! object_store reads the environment, but knows no profiles. This reads the named one (`AWS_PROFILE`, else `default`) and
//! tells where credentials come from when they are not just keys: a role, an SSO login, a program, a web identity, a
//! container. Keys in the environment take precedence over all of these.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_core::{Error, Result};

use super::credentials::Origin;

/// Profile keys, and the names that they have in the environment or with object_store.
const KNOWN: [(&str, &str); 8] = [
    ("aws_access_key_id", "aws_access_key_id"),
    ("aws_secret_access_key", "aws_secret_access_key"),
    ("aws_session_token", "aws_session_token"),
    ("region", "aws_region"),
    ("endpoint_url", "aws_endpoint"),
    ("use_fips_endpoint", "aws_use_fips_endpoint"),
    ("use_dualstack_endpoint", "aws_use_dualstack_endpoint"),
    ("ca_bundle", "aws_ca_bundle"),
];
/// Profile keys that say how to obtain credentials, other than a role's.
const OBTAINED: [&str; 4] = ["credential_process", "sso_session", "sso_start_url", "web_identity_token_file"];

/// What profile and environment say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Profile {
    /// Values by object_store's names.
    pub(super) values: Vec<(String, String)>,
    /// Where credentials must be obtained from; none where they are among the values, in the environment, or the
    /// machine's own.
    pub(super) origin: Option<Origin>,
}

/// Reads the profile; `environment` has lower-case names.
pub(super) async fn read(environment: &[(String, String)]) -> Result<Profile> {
    let variable =
        |name: &str| environment.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let home = || std::env::home_dir().map(|home| home.join(".aws"));
    let file = |name: &str, default: &str| {
        variable(name).map(PathBuf::from).or_else(|| home().map(|folder| folder.join(default)))
    };
    let credentials = text(file("aws_shared_credentials_file", "credentials")).await?;
    let config = text(file("aws_config_file", "config")).await?;
    let own_keys = variable("aws_access_key_id").is_some();
    let mut profile = select(variable("aws_profile").as_deref(), own_keys, &credentials, &config)?;
    let has_keys = own_keys || profile.values.iter().any(|(name, _)| name == "aws_access_key_id");
    if !has_keys && variable("aws_role_arn").is_some() {
        let identity = variable("aws_web_identity_token_file").map(Origin::WebIdentity);
        profile.origin = profile.origin.or(identity);
    }
    if !has_keys {
        let names = ["aws_container_credentials_relative_uri", "aws_container_credentials_full_uri"];
        let container = names.into_iter().find_map(variable).map(Origin::Container);
        profile.origin = profile.origin.or(container);
    }
    Ok(profile)
}

async fn text(path: Option<PathBuf>) -> Result<String> {
    let Some(path) = path else { return Ok(String::new()) };
    match tokio::fs::read_to_string(Path::new(&path)).await {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(Error::from(error).context(path.display())),
    }
}

/// Picks the profile's values; credentials in the environment take precedence over the profile's.
fn select(named: Option<&str>, own_keys: bool, credentials: &str, config: &str) -> Result<Profile> {
    let name = named.unwrap_or("default");
    let section = if name == "default" { "default".to_owned() } else { format!("profile {name}") };
    let (from_config, from_credentials) = (parse(config, &section), parse(credentials, name));
    if named.is_some() && from_config.is_none() && from_credentials.is_none() {
        return Err(Error::invalid(format!("AWS profile `{name}` does not exist"))
            .with_hint("look into ~/.aws/credentials and ~/.aws/config, or unset AWS_PROFILE"));
    }
    let mut found = from_config.unwrap_or_default();
    found.extend(from_credentials.unwrap_or_default());
    // A role is assumed with the keys beside it, not replaced by them.
    let obtained = found.contains_key("role_arn")
        || (!found.contains_key("aws_access_key_id") && OBTAINED.iter().any(|key| found.contains_key(*key)));
    let origin = (obtained && !own_keys).then(|| Origin::Profile(name.to_owned()));
    if named.is_some() && !own_keys && origin.is_none() && !found.contains_key("aws_access_key_id") {
        return Err(Error::invalid(format!("AWS profile `{name}` says nothing about credentials"))
            .with_hint(
                "give it keys, a role_arn, an sso_session or a credential_process, or unset AWS_PROFILE",
            ));
    }
    let keys_count = !own_keys && origin.is_none();
    let wanted = KNOWN.iter().filter(|(key, _)| keys_count || !key.starts_with("aws_"));
    let values = wanted.filter_map(|(key, name)| Some(((*name).to_owned(), found.get(*key)?.clone())));
    Ok(Profile { values: values.collect(), origin })
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
        endpoint_url = http://lab:9000\nuse_dualstack_endpoint = true\nca_bundle = /c.pem\n[profile sso]\nsso_start_url = x\n[profile role]\nregion = r\n\
        role_arn = arn\nsource_profile = lab\n[profile program]\ncredential_process = p\n[profile bare]\n\
        region = r";

    fn check(named: Option<&str>, own_keys: bool, wanted: &[(&str, &str)]) {
        let mut found = select(named, own_keys, CREDENTIALS, CONFIG).expect("profile").values;
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
                ("aws_ca_bundle", "/c.pem"),
                ("aws_endpoint", "http://lab:9000"),
                ("aws_region", "us-east-2"),
                ("aws_secret_access_key", "M"),
                ("aws_session_token", "T"),
                ("aws_use_dualstack_endpoint", "true"),
            ],
        );
        check(Some("sso"), true, &[]);
        check(None, true, &[("aws_region", "eu-west-1")]);
    }

    #[test]
    fn a_named_profile_must_exist_and_be_understood() {
        for name in ["none", "bare"] {
            let error = select(Some(name), false, CREDENTIALS, CONFIG).expect_err(name);
            assert!(error.message().contains(name) && error.hint().is_some(), "{error}");
        }
        assert_eq!(select(None, false, "", "").expect("no files are fine"), Profile::default());
    }

    #[test]
    fn roles_logins_and_programs_are_origins_unless_the_environment_has_keys() {
        for name in ["role", "sso", "program"] {
            let origin = |own_keys| select(Some(name), own_keys, CREDENTIALS, CONFIG).expect(name).origin;
            assert_eq!(origin(false), Some(Origin::Profile(name.into())));
            assert_eq!(origin(true), None);
        }
        check(Some("role"), false, &[("aws_region", "r")]);
        let default = "[default]\naws_access_key_id = A\naws_secret_access_key = S\nrole_arn = arn\n\
            source_profile = default";
        let role = select(None, false, "", default).expect("a role with its own keys");
        assert_eq!(role, Profile { values: vec![], origin: Some(Origin::Profile("default".into())) });
    }
}
