//! AWS credentials that change: of profiles that assume a role, log in through SSO or run a program, of a web identity, of a
//! container (ECS, EKS Pod Identity), of an instance; and the keys of a profile's file, which somebody may replace.
//!
//! The `aws-config` crate knows how the temporary ones are obtained; its requests go over object_store's HTTP client. What it
//! gives is kept until a quarter of its lifetime, or five minutes if that is less, is left, and then asked for anew: by one
//! request while the others wait. As long as the old credentials hold, a failure to get new ones is only a warning. A store may
//! refuse them before their time, as when a session was revoked: then they are asked for at once. Keys of a file are read anew
//! every [`REREAD`], and whenever the store refuses them: that costs two small files, and no service is asked.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use aws_config::Region;
use aws_config::ecs::EcsCredentialsProvider;
use aws_config::imds;
use aws_config::imds::credentials::ImdsCredentialsProvider;
use aws_config::profile::ProfileFileCredentialsProvider;
use aws_config::provider_config::ProviderConfig;
use aws_config::web_identity_token::WebIdentityTokenCredentialsProvider;
use aws_credential_types::Credentials;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_smithy_runtime_api::client::http::{
    HttpConnector as SmithyConnector, HttpConnectorFuture, SharedHttpConnector, http_client_fn,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_types::body::SdkBody;
use bytes::Bytes;
use object_store::aws::AwsCredential;
use object_store::client::{HttpClient, HttpConnector, HttpRequestBody, ReqwestConnector};
use object_store::{Certificate, ClientOptions, CredentialProvider, Result};
use parking_lot::Mutex;

use super::profile_file::ProfileFiles;
use super::send::generic;
use crate::clock::Clock;
use crate::object::error::Fault;
use crate::task::TaskGroup;

/// Where credentials come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    /// The keys of a profile, in a file.
    Keys(ProfileFiles),
    /// A profile with a role, a login or a program.
    Profile(String),
    /// The token file that `AWS_WEB_IDENTITY_TOKEN_FILE` names, for the role of `AWS_ROLE_ARN`.
    WebIdentity(String),
    /// The address that `AWS_CONTAINER_CREDENTIALS_RELATIVE_URI` or `AWS_CONTAINER_CREDENTIALS_FULL_URI` names.
    Container(String),
    /// The metadata service of the instance, where another address than the usual one is named there.
    Instance(Option<String>),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Keys(files) => write!(f, "the keys of AWS profile `{}`", files.name()),
            Self::Profile(name) => write!(f, "AWS profile `{name}`"),
            Self::WebIdentity(file) => write!(f, "the web identity token {file}"),
            Self::Container(address) => write!(f, "the container's endpoint {address}"),
            Self::Instance(None) => write!(f, "the instance's metadata service"),
            Self::Instance(Some(address)) => write!(f, "the instance's metadata service at {address}"),
        }
    }
}

impl Origin {
    /// Who gives them; `config` makes what asks services.
    fn provider(&self, config: impl FnOnce() -> Result<ProviderConfig>) -> Result<SharedCredentialsProvider> {
        Ok(match self {
            Self::Keys(files) => SharedCredentialsProvider::new(files.clone()),
            Self::Profile(name) => {
                SharedCredentialsProvider::new(Anew { name: name.clone(), config: config()? })
            }
            Self::WebIdentity(_) => SharedCredentialsProvider::new(
                WebIdentityTokenCredentialsProvider::builder().configure(&config()?).build(),
            ),
            Self::Container(_) => SharedCredentialsProvider::new(
                EcsCredentialsProvider::builder().configure(&config()?).build(),
            ),
            Self::Instance(address) => {
                let config = config()?;
                let client = imds::Client::builder()
                    .configure(&config)
                    .max_attempts(METADATA_ATTEMPTS)
                    .operation_timeout(METADATA_DEADLINE);
                let client = match address {
                    Some(address) => client.endpoint(address).map_err(generic)?,
                    None => client,
                };
                let provider =
                    ImdsCredentialsProvider::builder().configure(&config).imds_client(client.build());
                SharedCredentialsProvider::new(provider.build())
            }
        })
    }

    /// What to look at where it gives none.
    fn hint(&self) -> String {
        match self {
            Self::Keys(_) => "look into ~/.aws/credentials and ~/.aws/config, or where AWS_SHARED_CREDENTIALS_FILE and \
                AWS_CONFIG_FILE say that they are"
                .to_owned(),
            Self::Profile(name) => format!(
                "see what `aws sts get-caller-identity --profile {name}` says; \
                logins are renewed with `aws sso login --profile {name}`"
            ),
            Self::WebIdentity(_) => {
                "check AWS_WEB_IDENTITY_TOKEN_FILE, AWS_ROLE_ARN and AWS_REGION".to_owned()
            }
            Self::Container(_) => "check the task's role, or the pod's identity association; \
                AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE names the token"
                .to_owned(),
            Self::Instance(_) => {
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; a bucket that anybody may read needs none with \
                --anonymous (AWS_SKIP_SIGNATURE=true); on an instance, give it a role, and a hop limit of 2 where this runs in a container"
                    .to_owned()
            }
        }
    }
}

/// A profile whose files are read anew each time: aws-config's own provider keeps what it found there at first, such as the keys
/// with which a role is assumed.
#[derive(Debug)]
struct Anew {
    name: String,
    config: ProviderConfig,
}

impl ProvideCredentials for Anew {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let builder = ProfileFileCredentialsProvider::builder().configure(&self.config);
        let provider = builder.profile_name(&self.name).build();
        future::ProvideCredentials::new(async move { provider.provide_credentials().await })
    }
}

/// How often a metadata service is asked, each time for a second or two, and for how long in all: it is on this host.
const METADATA_ATTEMPTS: u32 = 3;
const METADATA_DEADLINE: Duration = Duration::from_secs(8);
/// New credentials are asked for when this is left of the old ones.
const AHEAD: Duration = Duration::from_secs(300);
/// After a failure the old ones serve this long before it is tried again, and so do new ones that the store refuses.
const PAUSE: Duration = Duration::from_secs(10);
/// How old the keys of a file may be.
const REREAD: Duration = Duration::from_secs(30);
/// Whoever asks while they still hold waits this long for new ones.
const GRACE: Duration = Duration::from_secs(1);
/// Longest that a program or a token service may take: a person may have to touch a key.
const DEADLINE: Duration = Duration::from_secs(60);

/// Credentials that are renewed in time, by a task of their own: requests are given up after a while, and a program that
/// was begun for one is heard to its end all the same.
#[derive(Debug)]
pub(super) struct Renewed {
    source: Arc<Source>,
    tasks: TaskGroup,
}

#[derive(Debug)]
struct Source {
    origin: Origin,
    provider: SharedCredentialsProvider,
    clock: Clock,
    current: Mutex<Option<Current>>,
    /// Held while new ones are fetched, so that one task does it for all.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// What there is at a moment.
enum Held {
    Fresh(Arc<AwsCredential>),
    /// To be renewed, and good until then.
    Old(Arc<AwsCredential>),
    Nothing,
}

/// Times are seconds since 1970; `None` is never.
#[derive(Debug)]
struct Current {
    credential: Arc<AwsCredential>,
    renew_at: Option<i64>,
    expires: Option<i64>,
    /// When they were asked for, or newer ones in vain.
    asked_at: i64,
    /// Newer ones were asked for in vain, which was said.
    is_left: bool,
}

impl Renewed {
    /// Gets the first credentials: what is wrong with a profile is told at once. `region` is asked for tokens; `trusted` are
    /// certificates of authorities, in PEM, besides the system's.
    pub(super) async fn open(origin: Origin, region: Option<String>, trusted: Option<&str>) -> Result<Self> {
        let provider = origin.provider(|| asking(region, trusted))?;
        let renewed = Self::over(origin, provider, Clock::system());
        renewed.get_credential().await?;
        Ok(renewed)
    }

    /// Asks for new credentials because the store refuses `used`, whatever their time. Temporary ones are asked for at most once
    /// per [`PAUSE`]. Returns whether there are others, which is worth another request.
    pub(super) async fn renew_refused(&self, used: Option<Arc<AwsCredential>>) -> bool {
        let (source, turn) = (self.source.clone(), self.source.turn.clone().lock_owned().await);
        let refused = used.clone();
        let renewal = self.tasks.spawn("renew", async move {
            let _turn = turn;
            source.renew_refused(refused).await
        });
        matches!(renewal.await, Ok(Ok(held)) if Some(&held) != used.as_ref())
    }

    /// What a request that begins now is signed with, if it need not be asked for first.
    pub(super) fn current(&self) -> Option<Arc<AwsCredential>> {
        self.source.current.lock().as_ref().map(|held| held.credential.clone())
    }

    /// Whether to ask for new ones disturbs nobody, however often it is done.
    pub(super) fn are_of_file(&self) -> bool {
        self.source.is_file()
    }

    pub(super) fn over(origin: Origin, provider: SharedCredentialsProvider, clock: Clock) -> Self {
        let source = Source { origin, provider, clock, current: Mutex::default(), turn: Arc::default() };
        Self { source: Arc::new(source), tasks: TaskGroup::new("credentials") }
    }
}

impl Source {
    fn is_file(&self) -> bool {
        matches!(self.origin, Origin::Keys(_))
    }

    fn held(&self) -> Held {
        let now = self.clock.wall().seconds;
        match self.current.lock().as_ref() {
            Some(held) if held.renew_at.is_none_or(|at| now < at) => Held::Fresh(held.credential.clone()),
            Some(held) if held.expires.is_none_or(|expires| now < expires) => {
                Held::Old(held.credential.clone())
            }
            _ => Held::Nothing,
        }
    }

    /// Fetches new ones, unless somebody just did.
    async fn renew(&self) -> Result<Arc<AwsCredential>> {
        if let Held::Fresh(credential) = self.held() {
            return Ok(credential);
        }
        let fetched = self.fetch(self.clock.wall().seconds).await;
        let mut current = self.current.lock();
        match (fetched, current.as_mut()) {
            (Ok(fetched), held) => {
                if held.is_some_and(|held| held.credential != fetched.credential) {
                    tracing::info!(origin = %self.origin, "new credentials");
                }
                Ok(current.insert(fetched).credential.clone())
            }
            (Err(error), Some(held)) => {
                if !std::mem::replace(&mut held.is_left, true) {
                    tracing::warn!(%error, "no new credentials: the old ones serve as long as they hold");
                }
                held.asked_at = self.clock.wall().seconds;
                let again = held.asked_at + seconds(PAUSE);
                held.renew_at = Some(held.expires.map_or(again, |expires| again.min(expires)));
                Err(error)
            }
            (Err(error), None) => Err(error),
        }
    }

    async fn renew_refused(&self, used: Option<Arc<AwsCredential>>) -> Result<Arc<AwsCredential>> {
        let now = self.clock.wall().seconds;
        if let Some(held) = self.current.lock().as_mut() {
            let is_other = used.is_some_and(|used| used != held.credential);
            if is_other || (!self.is_file() && now < held.asked_at + seconds(PAUSE)) {
                return Ok(held.credential.clone());
            }
            held.renew_at = Some(now);
        }
        if !self.is_file() {
            tracing::warn!(origin = %self.origin, "the store refuses the credentials before their time: new ones are asked for");
        }
        self.renew().await
    }

    async fn fetch(&self, now: i64) -> Result<Current> {
        let failed = |cause| {
            let (origin, hint) = (self.origin.to_string(), self.origin.hint());
            Fault::Credentials { origin, cause, hint }
        };
        let asked = self.provider.provide_credentials();
        let given = if self.is_file() {
            // A read that a file system hangs on goes on behind a timeout: this way there is one of them.
            asked.await
        } else {
            tokio::time::timeout(DEADLINE, asked)
                .await
                .map_err(|_| failed(format!("no answer within {} s", DEADLINE.as_secs())))?
        };
        let given = given.map_err(|error| failed(causes(&error)))?;
        let expires = given.expiry().map(|time| {
            let since_1970 = time.duration_since(UNIX_EPOCH).unwrap_or_default();
            i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX)
        });
        let renew_at = match self.is_file() {
            true => Some(now + seconds(REREAD)),
            false => expires.map(|expires| expires - ((expires - now) / 4).clamp(0, seconds(AHEAD))),
        };
        let credential = Arc::new(convert(&given));
        Ok(Current { credential, renew_at, expires, asked_at: now, is_left: false })
    }
}

#[async_trait]
impl CredentialProvider for Renewed {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> Result<Arc<AwsCredential>> {
        let (old, turn) = match self.source.held() {
            Held::Fresh(credential) => return Ok(credential),
            Held::Old(credential) => match self.source.turn.clone().try_lock_owned() {
                Ok(turn) => (Some(credential), turn),
                // Somebody is at it.
                Err(_) => return Ok(credential),
            },
            Held::Nothing => (None, self.source.turn.clone().lock_owned().await),
        };
        let source = self.source.clone();
        let renewal = self.tasks.spawn("renew", async move {
            let _turn = turn;
            source.renew().await
        });
        let ended = |error| object_store::Error::Generic { store: "credentials", source: Box::new(error) };
        match old {
            None => renewal.await.map_err(ended)?,
            Some(old) => match tokio::time::timeout(GRACE, renewal).await {
                Ok(Ok(Ok(new))) => Ok(new),
                _ => Ok(old),
            },
        }
    }
}

/// What aws-config asks services with.
fn asking(region: Option<String>, trusted: Option<&str>) -> Result<ProviderConfig> {
    let mut options = ClientOptions::default().with_allow_http(true);
    for certificate in Certificate::from_pem_bundle(trusted.unwrap_or_default().as_bytes())? {
        options = options.with_root_certificate(certificate);
    }
    let client = ReqwestConnector::default().connect(&options)?;
    let connector = SharedHttpConnector::new(Connector(client));
    let region = region.unwrap_or_else(|| "us-east-1".into());
    Ok(ProviderConfig::without_region()
        .with_region(Some(Region::new(region)))
        .with_http_client(http_client_fn(move |_, _| connector.clone())))
}

fn seconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

fn convert(given: &Credentials) -> AwsCredential {
    AwsCredential {
        key_id: given.access_key_id().to_owned(),
        secret_key: given.secret_access_key().to_owned(),
        token: given.session_token().map(str::to_owned),
    }
}

/// An error and everything behind it: aws-config's outer ones only name the step that failed.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

/// aws-config's requests over object_store's client. All of them are small.
#[derive(Debug)]
struct Connector(HttpClient);

impl SmithyConnector for Connector {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let client = self.0.clone();
        HttpConnectorFuture::new(async move {
            let body = request.body().bytes().map(Bytes::copy_from_slice).unwrap_or_default();
            let mut head = http::Request::builder().method(request.method()).uri(request.uri());
            for (name, value) in request.headers() {
                head = head.header(name, value);
            }
            let sent = head.body(HttpRequestBody::from(body)).map_err(|error| other(error.into()))?;
            let answer = client.execute(sent).await.map_err(|error| ConnectorError::io(error.into()))?;
            let (head, body) = answer.into_parts();
            let body = body.bytes().await.map_err(|error| ConnectorError::io(error.into()))?;
            let status = head.status.as_u16().try_into().map_err(|error| other(Box::new(error)))?;
            let mut answer = HttpResponse::new(status, SdkBody::from(body));
            for (name, value) in &head.headers {
                if let Ok(value) = value.to_str() {
                    answer.headers_mut().append(name.as_str().to_owned(), value.to_owned());
                }
            }
            Ok(answer)
        })
    }
}

fn other(error: Box<dyn std::error::Error + Send + Sync>) -> ConnectorError {
    ConnectorError::other(error, None)
}

#[cfg(test)]
mod tests;
