//! From a bucket URL to a store: credentials, endpoint and client options in one place.
//!
//! Values come from, last wins: the AWS profile, the environment (only names that begin with the provider's own
//! prefix), the settings. object_store's retries and timeouts are off; the decorators above do both.

use std::sync::Arc;

use forebay_core::shell::quoted;
use forebay_core::{Error, ErrorKind, Result};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::ClientConfigKey;
use object_store::gcp::{GcpCredential, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{RetryConfig, StaticCredentialProvider};
use url::Url;

use super::azure::{self, Azure};
use super::credentials::{Origin, Renewed};
use super::endpoint::{Wishes, warn_of_ignored, with_bucket};
use super::file::Directory;
use super::google::{self, Google};
use super::profile;
use super::s3::{CustomerKey, Manner, S3, Signed};
use super::send::{Sender, Transport};
use super::storage_class::StorageClass;
use super::switch::is_on;
use crate::object::error::convert;
use crate::object::layer::Prefix;
use crate::object::request::Shared;
use crate::object::{BucketUrl, Scheme, StoreSettings};

/// What object_store takes where none is named.
const DEFAULT_REGION: &str = "us-east-1";
/// Far longer than any transfer: the decorators bound each attempt.
const NO_TIMEOUT: &str = "7days";

/// Hosts of stores that want all parts of an upload but the last to be of one size: Cloudflare's R2.
const EVEN_PARTS: &str = ".r2.cloudflarestorage.com";

/// A store, and what is known of it before it is asked.
pub(in crate::object) struct Connected {
    pub(in crate::object) service: Shared,
    /// All parts of an upload but the last have to be of one size.
    pub(in crate::object) wants_even_parts: bool,
    /// Requests carry no credentials.
    pub(in crate::object) is_anonymous: bool,
    /// The storage class of what is written, if not the bucket's own.
    pub(in crate::object) storage_class: Option<String>,
}

/// The store that `url` names, its keys relative to the URL's prefix. Sends no request.
pub(in crate::object) async fn connect(url: &BucketUrl, settings: &StoreSettings) -> Result<Connected> {
    let class = |prefix: &str| storage_class(url, settings, prefix);
    let connected = |store: Shared, is_anonymous: bool, class: StorageClass| Connected {
        service: Prefix::wrap(store, &url.prefix),
        wants_even_parts: false,
        is_anonymous,
        storage_class: class.into_name(),
    };
    Ok(match url.scheme {
        Scheme::S3 => {
            let class = class("AWS_")?;
            let (store, endpoint) = s3(url, settings, class.clone()).await?;
            let wants_even_parts = endpoint.is_some_and(|endpoint| has_even_parts(&endpoint));
            let is_anonymous = store.is_anonymous();
            Connected { wants_even_parts, ..connected(Arc::new(store), is_anonymous, class) }
        }
        Scheme::Gcs => {
            let class = class("GOOGLE_")?;
            let store = gcs(url, settings, class.clone()).await?;
            let is_anonymous = store.is_anonymous();
            connected(Arc::new(store), is_anonymous, class)
        }
        Scheme::Azure => {
            let class = class("AZURE_")?;
            let store = azure(url, settings, class.clone())?;
            let is_anonymous = store.is_anonymous();
            connected(Arc::new(store), is_anonymous, class)
        }
        // It is the whole path.
        Scheme::File => Connected {
            service: directory(url).await?,
            wants_even_parts: false,
            is_anonymous: false,
            storage_class: None,
        },
    })
}

fn has_even_parts(endpoint: &str) -> bool {
    let host = Url::parse(endpoint).ok().and_then(|url| url.host_str().map(str::to_ascii_lowercase));
    host.is_some_and(|host| host.ends_with(EVEN_PARTS))
}

async fn directory(url: &BucketUrl) -> Result<Shared> {
    let path = std::path::PathBuf::from(&url.prefix);
    let metadata = tokio::fs::metadata(&path).await.map_err(|error| {
        let error = Error::from(error).context(format!("directory of {url}"));
        match error.kind() {
            ErrorKind::NotFound => error
                .with_hint(format!("check the path; if it is to be a new one: mkdir -p {}", quoted(&path))),
            _ => error,
        }
    })?;
    if !metadata.is_dir() {
        let error = Error::new(ErrorKind::NotDirectory, format!("{} is not a directory", path.display()));
        return Err(error.with_hint("a file URL names the directory that holds the objects"));
    }
    Ok(Arc::new(Directory::new(path)))
}

fn environment(prefix: &str) -> Vec<(String, String)> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    let variables = std::env::vars_os().filter_map(text);
    variables
        .filter(|(name, value)| name.starts_with(prefix) && !value.is_empty())
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect()
}

/// The class that the settings say, else the environment: `prefix` is what the provider's variables begin with.
fn storage_class(url: &BucketUrl, settings: &StoreSettings, prefix: &str) -> Result<StorageClass> {
    let name = format!("{}storage_class", prefix.to_ascii_lowercase());
    let told = || environment(prefix).into_iter().find(|(known, _)| *known == name).map(|(_, value)| value);
    StorageClass::of_bucket(url, settings.storage_class.clone().or_else(told))
}

fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

/// An endpoint as clients need it: with a scheme. Without one, `host:port` would be taken for a scheme and a path.
fn check_endpoint(endpoint: Option<&String>) -> Result<()> {
    match endpoint {
        Some(given) if !given.starts_with("http://") && !given.starts_with("https://") => {
            Err(Error::invalid(format!("the endpoint `{given}` has no scheme"))
                .with_hint(format!("write https://{given}, or http://{given} for a server without TLS")))
        }
        _ => Ok(()),
    }
}

/// Whoever writes `http://` means it.
fn is_plain(endpoint: Option<String>) -> bool {
    endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"))
}

fn unknown_option(name: &str, url: &BucketUrl) -> Error {
    Error::invalid(format!("`{name}` is not an option of {url}"))
        .with_hint("options have object_store's names, for example aws_region or aws_endpoint")
}

/// As object_store reads it. What does not parse is told when the store is built.
fn is_set(builder: &AmazonS3Builder, key: AmazonS3ConfigKey) -> bool {
    builder.get_config_value(&key).is_some_and(|value| is_on(&value))
}

/// The instance's own credentials, where options do not ask for others, or for them as only object_store gets them.
fn instance(builder: &AmazonS3Builder) -> Option<Origin> {
    use AmazonS3ConfigKey as Key;
    let of_store =
        [Key::ContainerCredentialsRelativeUri, Key::ContainerCredentialsFullUri, Key::WebIdentityTokenFile];
    let is_of_store = of_store.iter().any(|key| builder.get_config_value(key).is_some());
    let is_old = is_set(builder, Key::ImdsV1Fallback);
    (!is_of_store && !is_old).then(|| Origin::Instance(builder.get_config_value(&Key::MetadataEndpoint)))
}

/// Sets where the bucket is asked, and says it unless it is object_store's own choice.
fn place_s3(
    mut builder: AmazonS3Builder,
    bucket: &str,
    wishes: &Wishes,
) -> Result<(AmazonS3Builder, Option<String>)> {
    use AmazonS3ConfigKey as Key;
    let given = [Key::S3Endpoint, Key::Endpoint].iter().find_map(|key| builder.get_config_value(key));
    check_endpoint(given.as_ref())?;
    let region = builder.get_config_value(&Key::Region).unwrap_or_else(|| DEFAULT_REGION.to_owned());
    let mut endpoint = match given {
        Some(given) => {
            wishes.give_way(&given)?;
            Some(given)
        }
        // Those of directory buckets follow from their names.
        None if is_set(&builder, Key::S3Express) => None,
        None => wishes.of_region(&region)?,
    };
    if is_set(&builder, Key::VirtualHostedStyleRequest) {
        endpoint = endpoint.map(|endpoint| with_bucket(&endpoint, bucket));
    }
    if let Some(endpoint) = &endpoint {
        builder = builder.with_config(Key::S3Endpoint, endpoint);
    }
    Ok((builder, endpoint))
}

/// Certificates of authorities to trust besides the system's, as text.
async fn certificates(file: &str) -> Result<String> {
    let failed = |error: Error| error.context(format!("AWS_CA_BUNDLE names {file}"));
    let text = tokio::fs::read_to_string(file).await.map_err(|error| failed(error.into()))?;
    match text.contains("-----BEGIN CERTIFICATE-----") {
        true => Ok(text),
        false => {
            Err(failed(Error::invalid("it holds no certificate"))
                .with_hint("the file is to hold them in PEM"))
        }
    }
}

/// What profile, environment and settings say of a bucket in S3.
struct Told {
    builder: AmazonS3Builder,
    wishes: Wishes,
    /// Where credentials come from, if not from the environment.
    origin: Option<Origin>,
    /// Authorities to trust besides the system's.
    trusted: Option<String>,
}

async fn told_of_s3(url: &BucketUrl, settings: &StoreSettings) -> Result<Told> {
    let environment = environment("AWS_");
    warn_of_ignored(&environment);
    let mut wishes = Wishes::default();
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(&url.bucket)
        .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), NO_TIMEOUT);
    let profile = profile::read(&environment).await?;
    for (name, value) in profile.values.into_iter().chain(environment) {
        if !wishes.take(&name, &value)
            && let Ok(key) = name.parse::<AmazonS3ConfigKey>()
        {
            builder = builder.with_config(key, value);
        }
    }
    for (name, value) in &settings.options {
        if !wishes.take(name, value) {
            let key = name.parse::<AmazonS3ConfigKey>().map_err(|_| unknown_option(name, url))?;
            builder = builder.with_config(key, value);
        }
    }
    if settings.anonymous {
        builder = builder.with_skip_signature(true);
    }
    let mut trusted = None;
    if let Some(file) = wishes.certificates() {
        let (text, key) =
            (certificates(file).await?, AmazonS3ConfigKey::Client(ClientConfigKey::ProxyCaCertificate));
        let proxy = builder.get_config_value(&key).unwrap_or_default();
        builder = builder.with_config(key, format!("{proxy}\n{text}"));
        trusted = Some(text);
    }
    Ok(Told { builder, wishes, origin: profile.origin, trusted })
}

/// A bucket in S3, and its endpoint unless that is object_store's own choice.
async fn s3(url: &BucketUrl, settings: &StoreSettings, class: StorageClass) -> Result<(S3, Option<String>)> {
    let Told { builder, wishes, origin, trusted } = told_of_s3(url, settings).await?;
    let (mut builder, endpoint) = place_s3(builder, &url.bucket, &wishes)?;
    if is_plain(endpoint.clone()) {
        builder = builder.with_allow_http(true);
    } else if builder.get_config_value(&AmazonS3ConfigKey::UnsignedPayload).as_deref() != Some("false") {
        // Over TLS a hash of the payload protects from nothing and costs more than the encryption.
        builder = builder.with_unsigned_payload(true);
    }
    let anonymous = is_set(&builder, AmazonS3ConfigKey::SkipSignature);
    let failed = |error| convert(&url.to_string(), error);
    let keys = builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId).is_some();
    let origin = origin.or_else(|| instance(&builder));
    let mut renewed = None;
    if let Some(origin) = origin.filter(|_| !anonymous && !keys) {
        let region = builder.get_config_value(&AmazonS3ConfigKey::Region);
        let opened = Arc::new(Renewed::open(origin, region, trusted.as_deref()).await.map_err(failed)?);
        builder = builder.with_credentials(opened.clone());
        renewed = Some(opened);
    }
    let manner = match anonymous {
        true => Manner::Anonymous,
        false if is_set(&builder, AmazonS3ConfigKey::S3Express) => Manner::InQuery,
        false => {
            let region = builder.get_config_value(&AmazonS3ConfigKey::Region);
            let is_payer = is_set(&builder, AmazonS3ConfigKey::RequestPayer);
            Manner::InHeader { region: region.unwrap_or_else(|| DEFAULT_REGION.to_owned()), is_payer }
        }
    };
    let customer = CustomerKey::of(&builder);
    let deletes_many = !is_set(&builder, AmazonS3ConfigKey::DisableBulkDelete);
    let transport = Transport::default();
    let builder = builder.with_retry(no_retries()).with_http_connector(transport.clone());
    let mut signer = builder.clone();
    if anonymous {
        signer = signer.with_skip_signature(false).with_credentials(Signed::no_credentials());
    }
    let store = builder.build().map_err(failed)?;
    let signer = if anonymous { signer.build().map_err(failed)? } else { store.clone() };
    let sender = Sender::new(&transport).map_err(failed)?;
    let signed = Signed::new(sender, signer, manner);
    Ok((S3 { store, signed, bucket: url.bucket.clone(), deletes_many, customer, class, renewed }, endpoint))
}

async fn gcs(url: &BucketUrl, settings: &StoreSettings, class: StorageClass) -> Result<Google> {
    let transport = Transport::default();
    let mut builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(&url.bucket)
        .with_config(GoogleConfigKey::Client(ClientConfigKey::Timeout), NO_TIMEOUT)
        .with_retry(no_retries())
        .with_http_connector(transport.clone());
    for (name, value) in &settings.options {
        builder = builder.with_config(name.parse().map_err(|_| unknown_option(name, url))?, value);
    }
    if settings.anonymous {
        builder = builder.with_skip_signature(true);
    }
    if builder.get_config_value(&GoogleConfigKey::SkipSignature).is_some_and(|value| is_on(&value)) {
        // Else a login is looked for, and what is wrong with that one would be an error.
        let none = GcpCredential { bearer: String::new() };
        builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(none)));
    } else {
        google::check_login(&builder).await.map_err(|error| error.context(url))?;
    }
    if is_plain(builder.get_config_value(&GoogleConfigKey::BaseUrl)) {
        builder = builder.with_config(GoogleConfigKey::Client(ClientConfigKey::AllowHttp), "true");
    }
    let failed = |error| convert(&url.to_string(), error);
    let place = google::Place::of(&builder, &url.bucket, &url.prefix);
    let store = builder.build().map_err(failed)?;
    let sender = Sender::new(&transport).map_err(failed)?;
    Ok(Google::new(store, sender, place, class))
}

fn azure(url: &BucketUrl, settings: &StoreSettings, class: StorageClass) -> Result<Azure> {
    let transport = Transport::default();
    let mut builder = MicrosoftAzureBuilder::from_env()
        .with_container_name(&url.bucket)
        .with_config(AzureConfigKey::Client(ClientConfigKey::Timeout), NO_TIMEOUT)
        .with_retry(no_retries())
        .with_http_connector(transport.clone());
    for (name, value) in &settings.options {
        builder = builder.with_config(name.parse().map_err(|_| unknown_option(name, url))?, value);
    }
    if settings.anonymous {
        builder = builder.with_skip_signature(true);
    }
    if is_plain(builder.get_config_value(&AzureConfigKey::Endpoint)) {
        builder = builder.with_config(AzureConfigKey::Client(ClientConfigKey::AllowHttp), "true");
    }
    let failed = |error| convert(&url.to_string(), error);
    let place = azure::Place::of(&builder, &url.bucket).map_err(failed)?;
    let store = builder.build().map_err(failed)?;
    let sender = Sender::new(&transport).map_err(failed)?;
    Ok(Azure::new(store, sender, place, class))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder(values: &[(AmazonS3ConfigKey, &str)]) -> AmazonS3Builder {
        let builder = AmazonS3Builder::new().with_bucket_name("data");
        values.iter().fold(builder, |builder, (key, value)| builder.with_config(*key, *value))
    }

    #[test]
    fn an_endpoint_that_is_named_stands_and_others_follow_from_the_region() {
        use AmazonS3ConfigKey::{Endpoint, Region, S3Endpoint, S3Express, VirtualHostedStyleRequest};
        let (oss, virtual_style) =
            ("https://s3.oss-cn-hangzhou.aliyuncs.com", (VirtualHostedStyleRequest, "true"));
        for (values, expected) in [
            (vec![(Region, "eu-west-1")], None),
            (vec![(Region, "cn-north-1")], Some("https://s3.cn-north-1.amazonaws.com.cn")),
            (
                vec![(Region, "cn-north-1"), virtual_style],
                Some("https://data.s3.cn-north-1.amazonaws.com.cn"),
            ),
            (
                vec![(Region, "cn-north-1"), (Endpoint, "https://s3.example.com")],
                Some("https://s3.example.com"),
            ),
            (vec![(Endpoint, "http://127.0.0.1:1"), (S3Endpoint, oss)], Some(oss)),
            (vec![(Endpoint, oss), virtual_style], Some("https://data.s3.oss-cn-hangzhou.aliyuncs.com")),
            (vec![(Region, "cn-north-1"), (S3Express, "true")], None),
        ] {
            let (placed, endpoint) = place_s3(builder(&values), "data", &Wishes::default()).expect("a place");
            assert_eq!(endpoint.as_deref(), expected, "{values:?}");
            assert_eq!(placed.get_config_value(&S3Endpoint).as_deref(), expected, "{values:?}");
        }
    }

    #[test]
    fn who_wants_parts_of_one_size_is_known_by_its_name() {
        for (endpoint, expected) in [
            ("https://0123abcd.r2.cloudflarestorage.com", true),
            ("https://0123abcd.eu.r2.cloudflarestorage.com/", true),
            ("https://s3.amazonaws.com", false),
            ("https://r2.example.com", false),
            ("nothing", false),
        ] {
            assert_eq!(has_even_parts(endpoint), expected, "{endpoint}");
        }
    }

    #[tokio::test]
    async fn a_bundle_that_holds_no_certificate_is_told() {
        let folder = tempfile::tempdir().expect("scratch");
        let file = folder.path().join("bundle.pem");
        let name = file.to_str().expect("UTF-8");
        let missing = certificates(name).await.expect_err("no file");
        assert!(
            missing.kind() == ErrorKind::NotFound && missing.to_string().contains("AWS_CA_BUNDLE"),
            "{missing}"
        );
        std::fs::write(&file, "no PEM").expect("file");
        let empty = certificates(name).await.expect_err("no certificate");
        assert!(empty.to_string().contains("holds no certificate") && empty.hint().is_some(), "{empty}");
        std::fs::write(&file, "-----BEGIN CERTIFICATE-----\n").expect("file");
        certificates(name).await.expect("one that is looked at later");
    }
}
