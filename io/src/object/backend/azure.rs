//! Azure Blob Storage.
//!
//! As any store of object_store's, but for the completion of an upload: object_store commits a block list without a
//! condition and without metadata. It is sent from here over the same connections, signed by object_store's own
//! authorizer, so that one request carries the blocks, the condition and the token by which a lost reply is settled.
//!
//! Blocks belong to a blob, not to an upload: who commits or puts a blob discards all blocks of it that were not
//! committed, whoever sent them. An upload that lost its blocks in this way lost a race for its key.
//!
//! Listings are read here, as object_store's reader refuses a page that has a key it cannot name.

mod pages;

use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, ETAG};
use http::{HeaderMap, HeaderName, HeaderValue};
use object_store::azure::{
    AzureAuthorizer, AzureConfigKey, AzureCredentialProvider, MicrosoftAzure, MicrosoftAzureBuilder,
};
use object_store::client::{HttpRequest, HttpRequestBody};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{PutMultipartOptions, PutResult, Result};
use sha2::{Digest, Sha256};
use url::Url;

use super::plain::Plain;
use super::send::{Sender, generic, header};
use super::storage_class::StorageClass;
use super::switch::is_on;
use crate::object::error::{service_code, unsupported};
use crate::object::layer::TOKEN_ATTRIBUTE;
use crate::object::request::{ListRequest, Page, Reply, Request, Service, UploadId};
use crate::object::types::Condition;

/// The account of the emulator, and where it listens, as object_store has them.
const EMULATOR: [&str; 2] = ["devstoreaccount1", "http://127.0.0.1:10000"];

/// The version of the protocol that requests are made in, object_store's. Its authorizer adds it to those that it signs.
const VERSION: &str = "2023-11-03";

/// The header that names an access tier.
const TIER: &str = "x-ms-access-tier";

/// One Azure container.
#[derive(Debug)]
pub(super) struct Azure {
    plain: Plain,
    sender: Sender,
    place: Place,
    /// None for a container that wants no credentials.
    credentials: Option<AzureCredentialProvider>,
    /// What is written with an access tier of its own.
    class: StorageClass,
}

/// Where the container is, and whose.
#[derive(Debug, Clone)]
pub(super) struct Place {
    account: String,
    container: Url,
    anonymous: bool,
    /// What names the key that the customer provides, where there is one.
    encryption: Vec<(HeaderName, HeaderValue)>,
}

impl Place {
    /// What `builder` is about to build, which the store does not tell.
    pub(super) fn of(builder: &MicrosoftAzureBuilder, container: &str) -> Result<Self> {
        let value = |key| builder.get_config_value(&key);
        let is = |key| value(key).is_some_and(|value| is_on(&value));
        let account = value(AzureConfigKey::AccountName);
        let (account, endpoint, segment) = match is(AzureConfigKey::UseEmulator) {
            true => {
                let account = account.unwrap_or_else(|| EMULATOR[0].to_owned());
                let endpoint = std::env::var("AZURITE_BLOB_STORAGE_URL");
                (account.clone(), endpoint.unwrap_or_else(|_| EMULATOR[1].to_owned()), Some(account))
            }
            false => {
                let account = account.unwrap_or_default();
                let service = if is(AzureConfigKey::UseFabricEndpoint) {
                    "blob.fabric.microsoft.com"
                } else {
                    "blob.core.windows.net"
                };
                let endpoint = value(AzureConfigKey::Endpoint);
                (account.clone(), endpoint.unwrap_or_else(|| format!("https://{account}.{service}")), None)
            }
        };
        let mut container_url = Url::parse(&endpoint).map_err(generic)?;
        let no_base = || generic(format!("`{endpoint}` cannot be the endpoint of a store"));
        container_url.path_segments_mut().map_err(|()| no_base())?.extend(segment).push(container);
        let anonymous = is(AzureConfigKey::SkipSignature);
        let key = value(AzureConfigKey::EncryptionKey);
        let encryption = key.map(|key| encryption_headers(&key)).transpose()?.unwrap_or_default();
        Ok(Self { account, container: container_url, anonymous, encryption })
    }

    /// A page of keys: <https://learn.microsoft.com/rest/api/storageservices/list-blobs>.
    fn page(&self, list: &ListRequest) -> Url {
        let mut url = self.container.clone();
        let mut query = url.query_pairs_mut();
        query.extend_pairs([("restype", "container"), ("comp", "list"), ("prefix", &list.prefix)]);
        if list.delimited {
            query.append_pair("delimiter", "/");
        }
        match (&list.token, &list.after) {
            (Some(token), _) => drop(query.append_pair("marker", token)),
            // From this key on, with it.
            (None, Some(after)) => drop(query.append_pair("startFrom", after)),
            (None, None) => {}
        }
        if let Some(limit) = list.limit {
            query.append_pair("maxresults", &limit.to_string());
        }
        drop(query);
        url
    }

    /// What `part` names of the blob at `key`.
    fn of_blob(&self, key: &Path, part: &str) -> Url {
        let mut url = self.container.clone();
        let mut segments = url.path_segments_mut().expect("it was extended when it was made");
        segments.extend(key.parts());
        drop(segments);
        url.query_pairs_mut().append_pair("comp", part);
        url
    }
}

impl Azure {
    /// `sender` sends over the connections of `store`.
    pub(super) fn new(store: MicrosoftAzure, sender: Sender, place: Place, class: StorageClass) -> Self {
        let credentials = (!place.anonymous).then(|| store.credentials().clone());
        Self { plain: Plain::cloud(store), sender, place, credentials, class }
    }

    /// Whether requests carry no credentials.
    pub(super) fn is_anonymous(&self) -> bool {
        self.place.anonymous
    }

    async fn complete(
        &self,
        upload: &UploadId,
        parts: &[PartId],
        condition: &Condition,
    ) -> Result<PutResult> {
        let body = Bytes::from(write_blocks(parts));
        let mut request = http::Request::put(self.place.of_blob(&upload.key, "blocklist").as_str());
        let tier = self.class.of(&upload.key).map(|class| header(TIER, class)).transpose()?;
        let headers =
            condition_header(condition)?.into_iter().chain(token_header(&upload.token)?).chain(tier);
        for (name, value) in headers.chain(self.place.encryption.iter().cloned()) {
            request = request.header(name, value);
        }
        let request = request.header(CONTENT_LENGTH, body.len()).body(HttpRequestBody::from(body));
        let sent = self.send(&upload.key, request.map_err(generic)?).await;
        let (head, _) = sent.map_err(|error| lost(upload, condition, error))?;
        let e_tag = head.get(ETAG).and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        Ok(PutResult { e_tag, version: None, extensions: Default::default() })
    }

    /// Gives what was copied its tier: object_store's copies all have the account's. The copy stands without it.
    async fn set_tier(&self, key: &Path, tier: &str) {
        let set = async {
            let (name, value) = header(TIER, tier)?;
            let request = http::Request::put(self.place.of_blob(key, "tier").as_str()).header(name, value);
            let request = request.header(CONTENT_LENGTH, 0).body(HttpRequestBody::empty());
            self.send(key, request.map_err(generic)?).await
        };
        if let Err(error) = set.await {
            tracing::warn!(%key, tier, %error, "a copy keeps the account's access tier");
        }
    }

    async fn list(&self, list: ListRequest) -> Result<Page> {
        let request = http::Request::get(self.place.page(&list).as_str()).body(HttpRequestBody::empty());
        let (_, body) = self.send(&Path::ROOT, request.map_err(generic)?).await?;
        pages::read(&body, &list)
    }

    /// Signs a request about `key` and sends it.
    async fn send(&self, key: &Path, mut request: HttpRequest) -> Result<(HeaderMap, Bytes)> {
        if let Some(credentials) = &self.credentials {
            let credential = credentials.get_credential().await?;
            AzureAuthorizer::new(&credential, &self.place.account).try_authorize(&mut request)?;
        } else {
            request.headers_mut().extend([header("x-ms-version", VERSION)?]);
        }
        self.sender.send(key, request).await
    }
}

#[async_trait]
impl Service for Azure {
    async fn call(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Create { options, .. } if options != PutMultipartOptions::default() => {
                Err(unsupported("tags and attributes of uploads in parts"))
            }
            // The store knows uploads by their blocks alone. A name tells those of one key apart in the notes.
            Request::Create { key, token, .. } => {
                Ok(Reply::Upload(UploadId { key, id: token.clone(), token }))
            }
            Request::Complete { upload, parts, condition } => {
                self.complete(&upload, &parts, &condition).await.map(Reply::Put)
            }
            Request::List(list) => self.list(list).await.map(Reply::Page),
            Request::Put { key, payload, mut options, token } => {
                self.class.mark(&key, &mut options.attributes);
                self.plain.call(Request::Put { key, payload, options, token }).await
            }
            Request::Copy { from, to, bytes, options } => {
                let copied = self.plain.call(Request::Copy { from, to: to.clone(), bytes, options }).await?;
                if let Some(tier) = self.class.of(&to) {
                    self.set_tier(&to, tier).await;
                }
                Ok(copied)
            }
            other => self.plain.call(other).await,
        }
    }
}

fn condition_header(condition: &Condition) -> Result<Option<(HeaderName, HeaderValue)>> {
    match condition {
        Condition::Always => Ok(None),
        Condition::IfAbsent => header("if-none-match", "*").map(Some),
        Condition::IfVersion(version) => header("if-match", version.as_str()).map(Some),
    }
}

/// The metadata that a write's token lies in.
fn token_header(token: &str) -> Result<Option<(HeaderName, HeaderValue)>> {
    let name = HeaderName::try_from(format!("x-ms-meta-{TOKEN_ATTRIBUTE}")).map_err(generic)?;
    let value = HeaderValue::from_str(token).map_err(generic)?;
    Ok((!token.is_empty()).then_some((name, value)))
}

/// The headers with which a blob is encrypted by a key of the customer's, as Put Block has them in object_store.
fn encryption_headers(key: &str) -> Result<Vec<(HeaderName, HeaderValue)>> {
    let digest = BASE64_STANDARD.encode(Sha256::digest(BASE64_STANDARD.decode(key).map_err(generic)?));
    let mut headers = vec![
        header("x-ms-encryption-key", key)?,
        header("x-ms-encryption-key-sha256", &digest)?,
        header("x-ms-encryption-algorithm", "AES256")?,
    ];
    headers.iter_mut().for_each(|(_, value)| value.set_sensitive(true));
    Ok(headers)
}

/// An error as it is; or, when a condition was to be held to and the blocks are gone, the refusal that this means: the
/// key was written meanwhile. Without a condition nothing is refused, and the upload may be made again.
fn lost(upload: &UploadId, condition: &Condition, error: object_store::Error) -> object_store::Error {
    match service_code(&error) {
        Some("InvalidBlockList") if *condition != Condition::Always => {
            object_store::Error::Precondition { path: upload.key.to_string(), source: Box::new(error) }
        }
        _ => error,
    }
}

/// The list of blocks that an upload is completed with. object_store names a block by text of its own, and sends the
/// name in base64. `Latest` means blocks that were committed, too: a completion may be sent again.
fn write_blocks(parts: &[PartId]) -> String {
    let mut text = String::from("<?xml version=\"1.0\" encoding=\"utf-8\"?>\n<BlockList>");
    for part in parts {
        text.push_str(&format!("<Latest>{}</Latest>", BASE64_STANDARD.encode(&part.content_id)));
    }
    text.push_str("</BlockList>");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(options: &[(&str, &str)]) -> Place {
        let builder = options.iter().fold(MicrosoftAzureBuilder::new(), |builder, (name, value)| {
            builder.with_config(name.parse().expect("an option"), *value)
        });
        Place::of(&builder, "c").expect("a place")
    }

    #[test]
    fn a_completion_goes_where_the_store_is() {
        let check = |options: &[(&str, &str)], expected: &str| {
            let url = place(options).of_blob(&Path::parse("d/a b%+ü").expect("a key"), "blocklist");
            assert_eq!(url.as_str(), format!("{expected}/c/d/a%20b%25+%C3%BC?comp=blocklist"));
        };
        check(&[("account_name", "me")], "https://me.blob.core.windows.net");
        let fabric = [("account_name", "me"), ("use_fabric_endpoint", "true")];
        check(&fabric, "https://me.blob.fabric.microsoft.com");
        let endpoint = [("account_name", "me"), ("azure_storage_endpoint", "http://localhost:1/me")];
        check(&endpoint[..], "http://localhost:1/me");
        let emulator = [("use_emulator", "true"), ("azure_skip_signature", "true")];
        check(&emulator, "http://127.0.0.1:10000/devstoreaccount1");
        assert!(place(&emulator).anonymous && !place(&fabric).anonymous);
    }

    #[test]
    fn blocks_are_listed_in_their_order() {
        let parts = ["numero1", "numero2"].map(|name| PartId { content_id: name.into() });
        let text = write_blocks(&parts);
        let listed = "<Latest>bnVtZXJvMQ==</Latest><Latest>bnVtZXJvMg==</Latest>";
        assert!(text.ends_with(&format!("<BlockList>{listed}</BlockList>")), "{text}");
    }

    #[test]
    fn a_key_of_the_customers_is_named() {
        let key = BASE64_STANDARD.encode([7; 32]);
        let headers = place(&[("account_name", "me"), ("encryption_key", &key)]).encryption;
        let values: Vec<_> = headers.iter().map(|(_, value)| value.to_str().expect("text")).collect();
        let digest = BASE64_STANDARD.encode(Sha256::digest([7; 32]));
        assert_eq!(values, [key.as_str(), &digest, "AES256"]);
        assert!(headers.iter().all(|(_, value)| value.is_sensitive()));
        assert!(place(&[("account_name", "me")]).encryption.is_empty());
    }
}
