//! Which of Google's logins can be used.
//!
//! object_store knows two kinds of credentials files, a service account's key and a user's login, and says of others that a
//! variant is unknown. Here they are told by their names, with what helps.

use std::path::{Path, PathBuf};

use forebay_core::{Error, ErrorKind, Result};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use serde::Deserialize;

/// Where `gcloud auth application-default login` leaves one, below the home directory.
const OF_GCLOUD: &str = ".config/gcloud/application_default_credentials.json";

#[derive(Debug, Deserialize)]
struct File {
    #[serde(rename = "type")]
    kind: String,
}

/// Looks at the login that `builder` is about to use. What is wrong with a file otherwise is object_store's to tell.
///
/// # Errors
/// `Unsupported` for one of a kind that it does not know.
pub(in crate::object::backend) async fn check(builder: &GoogleCloudStorageBuilder) -> Result<()> {
    let has_key = [GoogleConfigKey::ServiceAccount, GoogleConfigKey::ServiceAccountKey]
        .iter()
        .any(|key| builder.get_config_value(key).is_some());
    let named = builder.get_config_value(&GoogleConfigKey::ApplicationCredentials).map(PathBuf::from);
    let of_gcloud = || std::env::var_os("HOME").map(|home| Path::new(&home).join(OF_GCLOUD));
    let Some(path) = named.or_else(of_gcloud).filter(|_| !has_key) else { return Ok(()) };
    match tokio::fs::read(&path).await {
        Ok(text) => known(&path, &text),
        Err(_) => Ok(()),
    }
}

fn known(path: &Path, text: &[u8]) -> Result<()> {
    let Ok(File { kind }) = serde_json::from_slice(text) else { return Ok(()) };
    let (what, hint) = match kind.as_str() {
        "service_account" | "authorized_user" => return Ok(()),
        "external_account" => (
            "a workload identity federation",
            "on GKE, unset GOOGLE_APPLICATION_CREDENTIALS and bind the pod's service account to one of Google's: its metadata server \
             gives the credentials then; elsewhere, let GOOGLE_APPLICATION_CREDENTIALS name the key of a service account",
        ),
        "external_account_authorized_user" => (
            "a workforce identity federation",
            "let GOOGLE_APPLICATION_CREDENTIALS name the key of a service account",
        ),
        "impersonated_service_account" => (
            "an impersonation",
            "let GOOGLE_APPLICATION_CREDENTIALS name a key of that service account, or log in without --impersonate-service-account",
        ),
        _ => (
            "a login of another kind than a service account's key or a user's",
            "let GOOGLE_APPLICATION_CREDENTIALS name the key of a service account, or log in: gcloud auth application-default login",
        ),
    };
    let message = format!("{} is {what} (`{kind}`), which is not supported for gs://", path.display());
    Err(Error::new(ErrorKind::Unsupported, message).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logins_that_nobody_here_understands_are_told_by_their_names() {
        let told = |text: &str| known(Path::new("/k.json"), text.as_bytes());
        for fine in ["service_account", "authorized_user"] {
            told(&format!(r#"{{"type": "{fine}", "more": 1}}"#)).expect(fine);
        }
        told("{").expect("the client says what is wrong with it");
        for (kind, what) in [
            ("external_account", "workload identity federation"),
            ("external_account_authorized_user", "workforce identity federation"),
            ("impersonated_service_account", "impersonation"),
            ("gdch_service_account", "of another kind"),
        ] {
            let error = told(&format!(r#"{{"audience": "a", "type": "{kind}"}}"#)).expect_err(kind);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            for part in ["/k.json", what, kind] {
                assert!(error.message().contains(part), "{error}");
            }
            assert!(error.hint().is_some_and(|hint| hint.contains("service account")), "{error}");
        }
    }
}
