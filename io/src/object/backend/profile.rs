//! The AWS profile: where credentials come from, region and endpoint, from `~/.aws/credentials` and `~/.aws/config`.
//!
//! object_store reads the environment, but knows no profiles. This reads the named one (`AWS_PROFILE`, else `default`) and
//! tells where credentials come from: keys of the file, a role, an SSO login, a program, a web identity, a container. Keys in
//! the environment take precedence over all of these.

use forebay_core::{Error, Result};

use super::credentials::Origin;
use super::profile_file::{ProfileFiles, Section};

/// Profile keys, and the names that they have in the environment or with object_store.
const KNOWN: [(&str, &str); 5] = [
    ("region", "aws_region"),
    ("endpoint_url", "aws_endpoint"),
    ("use_fips_endpoint", "aws_use_fips_endpoint"),
    ("use_dualstack_endpoint", "aws_use_dualstack_endpoint"),
    ("ca_bundle", "aws_ca_bundle"),
];
/// Profile keys that say how to obtain credentials, other than a role's.
const OBTAINED: [&str; 4] = ["credential_process", "sso_session", "sso_start_url", "web_identity_token_file"];
/// Profile keys that are credentials: one of them without the other is a mistake, and told when they are asked for.
const KEYS: [&str; 2] = ["aws_access_key_id", "aws_secret_access_key"];

/// What profile and environment say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Profile {
    /// Values by object_store's names.
    pub(super) values: Vec<(String, String)>,
    /// Where credentials are to be had; none where they are in the environment, or the machine's own.
    pub(super) origin: Option<Origin>,
}

/// Reads the profile; `environment` has lower-case names.
pub(super) async fn read(environment: &[(String, String)]) -> Result<Profile> {
    let variable =
        |name: &str| environment.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let files = ProfileFiles::of(environment);
    let own_keys = variable("aws_access_key_id").is_some();
    let section = files.section().await?;
    let mut profile = select(files, own_keys, section)?;
    if !own_keys && variable("aws_role_arn").is_some() {
        let identity = variable("aws_web_identity_token_file").map(Origin::WebIdentity);
        profile.origin = profile.origin.or(identity);
    }
    if !own_keys {
        let names = ["aws_container_credentials_relative_uri", "aws_container_credentials_full_uri"];
        let container = names.into_iter().find_map(variable).map(Origin::Container);
        profile.origin = profile.origin.or(container);
    }
    Ok(profile)
}

/// Picks the profile's values; credentials in the environment take precedence over the profile's.
fn select(files: ProfileFiles, own_keys: bool, section: Option<Section>) -> Result<Profile> {
    let (name, is_named) = (files.name().to_owned(), files.named.is_some());
    if is_named && section.is_none() {
        return Err(Error::invalid(format!("AWS profile `{name}` does not exist"))
            .with_hint("look into ~/.aws/credentials and ~/.aws/config, or unset AWS_PROFILE"));
    }
    let found = section.unwrap_or_default();
    let has = |key: &str| found.contains_key(key);
    // A role is assumed with the keys beside it, not replaced by them.
    let is_obtained = has("role_arn") || (!has("aws_access_key_id") && OBTAINED.iter().any(|key| has(key)));
    let origin = match (is_obtained, KEYS.iter().any(|key| has(key))) {
        (true, _) => Some(Origin::Profile(name.clone())),
        (false, true) => Some(Origin::Keys(files)),
        (false, false) => None,
    };
    if is_named && !own_keys && origin.is_none() {
        return Err(Error::invalid(format!("AWS profile `{name}` says nothing about credentials"))
            .with_hint(
                "give it keys, a role_arn, an sso_session or a credential_process, or unset AWS_PROFILE",
            ));
    }
    let values = KNOWN.iter().filter_map(|(key, name)| Some(((*name).to_owned(), found.get(*key)?.clone())));
    Ok(Profile { values: values.collect(), origin: origin.filter(|_| !own_keys) })
}

#[cfg(test)]
mod tests {
    use super::super::profile_file::section;
    use super::*;

    const CREDENTIALS: &str = "[default]\naws_access_key_id = A\naws_secret_access_key=S\n# x = y\n[lab]\n\
        aws_access_key_id = L\naws_secret_access_key = M\naws_session_token = T";
    const CONFIG: &str = "[default]\nregion = eu-west-1\n[profile lab]\nregion=us-east-2\n\
        endpoint_url = http://lab:9000\nuse_dualstack_endpoint = true\nca_bundle = /c.pem\n[profile sso]\nsso_start_url = x\n[profile role]\nregion = r\n\
        role_arn = arn\nsource_profile = lab\n[profile program]\ncredential_process = p\n[profile bare]\n\
        region = r";

    fn files(named: Option<&str>) -> ProfileFiles {
        let named = named.map(|name| ("aws_profile".to_owned(), name.to_owned()));
        ProfileFiles::of(named.as_slice())
    }

    fn of(named: Option<&str>, own_keys: bool, credentials: &str, config: &str) -> Result<Profile> {
        select(files(named), own_keys, section(named.unwrap_or("default"), credentials, config))
    }

    fn check(named: Option<&str>, own_keys: bool, wanted: &[(&str, &str)]) {
        let mut found = of(named, own_keys, CREDENTIALS, CONFIG).expect("profile").values;
        found.sort();
        let found: Vec<_> = found.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        assert_eq!(found, wanted, "{named:?}");
    }

    #[test]
    fn a_profile_gives_region_endpoint_and_where_keys_are() {
        check(None, false, &[("aws_region", "eu-west-1")]);
        check(
            Some("lab"),
            false,
            &[
                ("aws_ca_bundle", "/c.pem"),
                ("aws_endpoint", "http://lab:9000"),
                ("aws_region", "us-east-2"),
                ("aws_use_dualstack_endpoint", "true"),
            ],
        );
        check(Some("sso"), true, &[]);
        check(None, true, &[("aws_region", "eu-west-1")]);
        for named in [None, Some("lab")] {
            let origin = |own_keys| of(named, own_keys, CREDENTIALS, CONFIG).expect("profile").origin;
            assert_eq!((origin(false), origin(true)), (Some(Origin::Keys(files(named))), None));
        }
    }

    #[test]
    fn a_named_profile_must_exist_and_be_understood() {
        for name in ["none", "bare"] {
            let error = of(Some(name), false, CREDENTIALS, CONFIG).expect_err(name);
            assert!(error.message().contains(name) && error.hint().is_some(), "{error}");
        }
        assert_eq!(of(None, false, "", "").expect("no files are fine"), Profile::default());
    }

    #[test]
    fn roles_logins_and_programs_are_origins_unless_the_environment_has_keys() {
        for name in ["role", "sso", "program"] {
            let origin = |own_keys| of(Some(name), own_keys, CREDENTIALS, CONFIG).expect(name).origin;
            assert_eq!(origin(false), Some(Origin::Profile(name.into())));
            assert_eq!(origin(true), None);
        }
        check(Some("role"), false, &[("aws_region", "r")]);
        let default = "[default]\naws_access_key_id = A\naws_secret_access_key = S\nrole_arn = arn\n\
            source_profile = default";
        let role = of(None, false, "", default).expect("a role with its own keys");
        assert_eq!(role, Profile { values: vec![], origin: Some(Origin::Profile("default".into())) });
    }
}
