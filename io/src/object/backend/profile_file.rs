//! The files that AWS profiles lie in, and the keys that stand there.
//!
//! Whoever rotates keys replaces these files while mounts and trainings run: an agent of a vault, a sidecar, a login of an
//! organization. So keys are taken out of them anew whenever they are asked for.

use std::collections::BTreeMap;
use std::path::PathBuf;

use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{self, ProvideCredentials, future};
use forebay_core::{Error, Result};

/// What a profile says, by its own names.
pub(super) type Section = BTreeMap<String, String>;

/// Which profile is meant, and where it may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProfileFiles {
    /// As `AWS_PROFILE` names it.
    pub(super) named: Option<String>,
    credentials: Option<PathBuf>,
    config: Option<PathBuf>,
}

impl ProfileFiles {
    /// Those that `environment` names, by lower-case names, or those of the home directory.
    pub(super) fn of(environment: &[(String, String)]) -> Self {
        let variable =
            |name: &str| environment.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        let home = || std::env::home_dir().map(|home| home.join(".aws"));
        let file = |name: &str, default: &str| {
            variable(name).map(PathBuf::from).or_else(|| home().map(|folder| folder.join(default)))
        };
        Self {
            named: variable("aws_profile"),
            credentials: file("aws_shared_credentials_file", "credentials"),
            config: file("aws_config_file", "config"),
        }
    }

    /// The profile's name.
    pub(super) fn name(&self) -> &str {
        self.named.as_deref().unwrap_or("default")
    }

    /// What the files say of the profile; `None` where neither names it. A file that is not there says nothing.
    pub(super) async fn section(&self) -> Result<Option<Section>> {
        let (credentials, config) = (text(&self.credentials).await?, text(&self.config).await?);
        Ok(section(self.name(), &credentials, &config))
    }

    /// The profile's keys.
    async fn keys(&self) -> provider::Result {
        let section = self.section().await.map_err(CredentialsError::provider_error)?.unwrap_or_default();
        let key = |name: &str| {
            section
                .get(name)
                .filter(|value| !value.is_empty())
                .cloned()
                .ok_or_else(|| CredentialsError::provider_error(format!("it has no {name}")))
        };
        let [id, secret] = [key("aws_access_key_id")?, key("aws_secret_access_key")?];
        let token = section.get("aws_session_token").filter(|token| !token.is_empty()).cloned();
        Ok(Credentials::new(id, secret, token, None, "profile"))
    }
}

impl ProvideCredentials for ProfileFiles {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.keys())
    }
}

async fn text(path: &Option<PathBuf>) -> Result<String> {
    let Some(path) = path else { return Ok(String::new()) };
    match tokio::fs::read_to_string(path).await {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(Error::from(error).context(path.display())),
    }
}

/// The profile `name` of the texts of both files, of which the credentials' counts more.
pub(super) fn section(name: &str, credentials: &str, config: &str) -> Option<Section> {
    let title = if name == "default" { "default".to_owned() } else { format!("profile {name}") };
    let (from_config, from_credentials) = (parse(config, &title), parse(credentials, name));
    if from_config.is_none() && from_credentials.is_none() {
        return None;
    }
    let mut found = from_config.unwrap_or_default();
    found.extend(from_credentials.unwrap_or_default());
    Some(found)
}

/// The keys of one section; `None` when there is no such section.
fn parse(text: &str, wanted: &str) -> Option<Section> {
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
