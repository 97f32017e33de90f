//! Google Cloud Storage.
//!
//! As any store of object_store's, but for conditions. A write names a generation where others name an ETag: it is
//! looked up first, and since the write names it, nothing can come in between. And the completion of an upload takes
//! no condition at all (Google answers NotImplemented). So an upload that may be completed on a condition is made
//! under a key of its own below [`STAGED`], and copied to its key inside the store, which does take one: that copy
//! is the one request that makes the object visible, or is refused. The key of its own is then deleted. What a process
//! that died left there goes with the abort of its upload, else when it is swept.
//!
//! Listings are read here, as object_store's reader refuses a page that has a key it cannot name. Objects that are stored
//! compressed are asked for as they are stored: else Google unpacks them on the way, and neither length nor range is theirs.

mod login;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{HeaderName, HeaderValue, Method};
use object_store::client::HttpRequestBody;
use object_store::gcp::{
    GcpCredentialProvider, GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey,
};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{CopyMode, PutMode, PutMultipartOptions, PutResult, Result, UpdateVersion};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use url::form_urlencoded::Serializer;

use super::client::AsStored;
use super::plain::Plain;
use super::s3::{page_query, read_e_tag, read_page, write_parts};
use super::send::{Sender, generic, header};
use super::storage_class::StorageClass;
use super::switch::is_on;
use crate::object::error::unsupported;
use crate::object::key::address;
use crate::object::request::{ListRequest, Page, Reply, Request, Service, UploadId};
use crate::object::types::{Condition, put_mode};
use crate::rng::Rng;

pub(super) use login::check as check_login;

/// Where uploads are made that are copied to their keys, relative to the bucket's prefix.
pub(in crate::object) const STAGED: &str = ".forebay/uploads";

/// What the id of such an upload begins with; its name below [`STAGED`] and the store's own id follow.
const MARK: &str = "staged:";

/// Where the store is unless told otherwise.
const ENDPOINT: &str = "https://storage.googleapis.com";

/// One Google bucket.
#[derive(Debug)]
pub(super) struct Google {
    plain: Plain,
    sender: Sender,
    place: Place,
    /// None for a bucket that wants no credentials.
    credentials: Option<GcpCredentialProvider>,
    /// What is written with a class of its own.
    class: StorageClass,
    rng: Rng,
}

/// Where the bucket is.
#[derive(Debug, Clone)]
pub(super) struct Place {
    endpoint: String,
    bucket: String,
    /// Empty, or with a slash at its end.
    prefix: String,
    anonymous: bool,
}

impl Place {
    /// What `builder` is about to build, which the store does not tell.
    pub(super) fn of(builder: &GoogleCloudStorageBuilder, bucket: &str, prefix: &str) -> Self {
        let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl);
        let skip = builder.get_config_value(&GoogleConfigKey::SkipSignature);
        Self {
            endpoint: endpoint.unwrap_or_else(|| ENDPOINT.to_owned()),
            bucket: bucket.to_owned(),
            prefix: if prefix.is_empty() { String::new() } else { format!("{prefix}/") },
            anonymous: skip.is_some_and(|value| is_on(&value)),
        }
    }

    /// `bucket/key`, as requests spell it.
    fn spell(&self, key: &Path) -> String {
        let [bucket, key] = [self.bucket.as_str(), key.as_ref()];
        format!(
            "{}/{}",
            utf8_percent_encode(bucket, NON_ALPHANUMERIC),
            utf8_percent_encode(key, NON_ALPHANUMERIC)
        )
    }

    /// The upload as the store knows it, and whether it is to be copied to its key.
    fn native(&self, upload: &UploadId) -> Result<(UploadId, bool)> {
        let Some((name, id)) = upload.id.strip_prefix(MARK).and_then(|rest| rest.split_once(':')) else {
            return Ok((upload.clone(), false));
        };
        let key = self.staged(name)?;
        Ok((UploadId { key, id: id.to_owned(), token: upload.token.clone() }, true))
    }

    fn staged(&self, name: &str) -> Result<Path> {
        let key = format!("{}{STAGED}/{name}", self.prefix);
        address(&key).ok_or_else(|| generic(format!("bad key {key}")))
    }
}

impl Google {
    /// `sender` sends over the connections of `store`.
    pub(super) fn new(store: GoogleCloudStorage, sender: Sender, place: Place, class: StorageClass) -> Self {
        let credentials = (!place.anonymous).then(|| store.credentials().clone());
        Self { plain: Plain::cloud(store), sender, place, credentials, class, rng: Rng::system() }
    }

    /// Whether requests carry no credentials.
    pub(super) fn is_anonymous(&self) -> bool {
        self.place.anonymous
    }

    /// The generation of what `key` holds, if that is what the condition wants; the write names it.
    async fn generation(&self, key: &Path, wanted: UpdateVersion) -> Result<UpdateVersion> {
        if wanted.version.is_some() {
            return Ok(wanted);
        }
        let gone = |source: &str| object_store::Error::Precondition {
            path: key.to_string(),
            source: source.to_owned().into(),
        };
        match self.plain.call(Request::head(key.clone())).await.and_then(Reply::object) {
            Ok(found) if found.meta.e_tag == wanted.e_tag => {
                Ok(UpdateVersion { e_tag: found.meta.e_tag, version: found.meta.version })
            }
            Ok(_) => Err(gone("it holds another version")),
            Err(object_store::Error::NotFound { .. }) => Err(gone("it does not exist")),
            Err(error) => Err(error),
        }
    }

    async fn create(
        &self,
        key: Path,
        mut options: PutMultipartOptions,
        token: String,
        conditional: bool,
    ) -> Result<UploadId> {
        let name = conditional.then(|| self.rng.name());
        let at = name.as_ref().map_or_else(|| Ok(key.clone()), |name| self.place.staged(name))?;
        self.class.mark(&at, &mut options.attributes);
        let create = Request::Create { key: at, options, token: token.clone(), conditional };
        let native = self.plain.call(create).await?.upload()?;
        let id = name.map_or(native.id.clone(), |name| format!("{MARK}{name}:{}", native.id));
        Ok(UploadId { key, id, token })
    }

    async fn complete(
        &self,
        upload: &UploadId,
        parts: &[PartId],
        condition: &Condition,
    ) -> Result<PutResult> {
        let (native, is_staged) = self.place.native(upload)?;
        if !is_staged {
            return self.finish(&native, parts).await;
        }
        match self.finish(&native, parts).await {
            // One that is complete already is not found any more: an earlier attempt came this far.
            Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
        let copied = self.copy(&native.key, &upload.key, condition).await;
        // What is refused may be asked for again; an upload that is given up is deleted then.
        if copied.is_ok() {
            self.discard(&native.key).await;
        }
        copied
    }

    /// Completes an upload under the key that it was begun with. object_store would not tell one that is not there.
    async fn finish(&self, native: &UploadId, parts: &[PartId]) -> Result<PutResult> {
        let id = utf8_percent_encode(&native.id, NON_ALPHANUMERIC);
        let body = write_parts(parts).replace("&quot;", "\"");
        self.put(Method::POST, &native.key, &format!("?uploadId={id}"), Vec::new(), body).await
    }

    /// Copies inside the store, if `condition` holds for the target.
    async fn copy(&self, from: &Path, to: &Path, condition: &Condition) -> Result<PutResult> {
        let mut headers = vec![header("x-goog-copy-source", &self.place.spell(from))?];
        if let Some(class) = self.class.of(to) {
            headers.push(header("x-goog-storage-class", class)?);
        }
        let generation = match put_mode(condition) {
            PutMode::Overwrite => None,
            PutMode::Create => Some("0".to_owned()),
            PutMode::Update(wanted) => {
                let unnamed = || unsupported("this store names no generations");
                Some(self.generation(to, wanted).await?.version.ok_or_else(unnamed)?)
            }
        };
        if let Some(generation) = generation {
            headers.push(header("x-goog-if-generation-match", &generation)?);
        }
        self.put(Method::PUT, to, "", headers, String::new()).await
    }

    /// Keys may hold characters that XML cannot: then the answer cannot be read and is asked for again URL-encoded.
    async fn list(&self, list: ListRequest) -> Result<Page> {
        let mut query = page_query(&list);
        match read_page(&self.ask(&query).await?, &list.prefix) {
            Ok(page) => Ok(page),
            Err(_) => {
                query.push(("encoding-type", "url".to_owned()));
                read_page(&self.ask(&query).await?, &list.prefix)
            }
        }
    }

    /// Asks something of the bucket.
    async fn ask(&self, query: &[(&'static str, String)]) -> Result<Bytes> {
        let query = Serializer::new(String::new()).extend_pairs(query).finish();
        let bucket = utf8_percent_encode(&self.place.bucket, NON_ALPHANUMERIC);
        let url = format!("{}/{bucket}?{query}", self.place.endpoint);
        self.send(Method::GET, &Path::ROOT, url, Vec::new(), String::new()).await
    }

    /// Sends a request about an object whose answer holds an ETag.
    async fn put(
        &self,
        method: Method,
        key: &Path,
        query: &str,
        headers: Vec<(HeaderName, HeaderValue)>,
        body: String,
    ) -> Result<PutResult> {
        let url = format!("{}/{}{query}", self.place.endpoint, self.place.spell(key));
        let answer = self.send(method, key, url, headers, body).await?;
        Ok(PutResult { e_tag: Some(read_e_tag(&answer)?), version: None, extensions: Default::default() })
    }

    async fn send(
        &self,
        method: Method,
        key: &Path,
        url: String,
        headers: Vec<(HeaderName, HeaderValue)>,
        body: String,
    ) -> Result<Bytes> {
        let mut request = http::Request::builder().method(method).uri(url).header(CONTENT_LENGTH, body.len());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if let Some(credentials) = &self.credentials {
            let bearer = format!("Bearer {}", credentials.get_credential().await?.bearer);
            let (name, mut value) = header("authorization", &bearer)?;
            value.set_sensitive(true);
            request = request.header(name, value);
        }
        let request = request.body(HttpRequestBody::from(body)).map_err(generic)?;
        self.sender.send(key, request).await.map(|(_, answer)| answer)
    }

    /// Deletes what was copied; where that fails, it is swept later.
    async fn discard(&self, staged: &Path) {
        let delete = Request::Delete { keys: vec![staged.clone()], once: false };
        if let Err(error) = self.plain.call(delete).await {
            tracing::warn!(key = %staged, %error, "an upload that was copied stays until it is swept");
        }
    }

    async fn abort(&self, upload: &UploadId) -> Result<Reply> {
        let (native, is_staged) = self.place.native(upload)?;
        let staged = native.key.clone();
        self.plain.call(Request::Abort { upload: native }).await?;
        match is_staged {
            true => self.plain.call(Request::Delete { keys: vec![staged], once: false }).await,
            false => Ok(Reply::Done),
        }
    }
}

#[async_trait]
impl Service for Google {
    async fn call(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Get { key, mut options } => {
                options.extensions.insert(AsStored);
                self.plain.call(Request::Get { key, options }).await
            }
            Request::List(list) => self.list(list).await.map(Reply::Page),
            Request::Put { key, payload, mut options, token } => {
                if let PutMode::Update(wanted) = options.mode {
                    options.mode = PutMode::Update(self.generation(&key, wanted).await?);
                }
                self.class.mark(&key, &mut options.attributes);
                self.plain.call(Request::Put { key, payload, options, token }).await
            }
            // object_store's copies are all of the bucket's own class.
            Request::Copy { from, to, options, .. } if self.class.of(&to).is_some() => {
                let condition = match options.mode {
                    CopyMode::Overwrite => Condition::Always,
                    CopyMode::Create => Condition::IfAbsent,
                };
                self.copy(&from, &to, &condition).await.map(|_| Reply::Done)
            }
            Request::Create { key, options, token, conditional } => {
                self.create(key, options, token, conditional).await.map(Reply::Upload)
            }
            Request::Part { upload, index, offset, payload } => {
                let (upload, _) = self.place.native(&upload)?;
                self.plain.call(Request::Part { upload, index, offset, payload }).await
            }
            Request::Complete { upload, parts, condition } => {
                self.complete(&upload, &parts, &condition).await.map(Reply::Put)
            }
            Request::Abort { upload } => self.abort(&upload).await,
            other => self.plain.call(other).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_tells_where_an_upload_is_made() {
        let builder = GoogleCloudStorageBuilder::new();
        let place = |prefix: &str| Place::of(&builder, "b", prefix);
        let upload = |id: &str| UploadId { key: Path::from("d/a b"), id: id.into(), token: String::new() };
        let check = |prefix: &str, id: &str, expected: (&str, &str, bool)| {
            let (native, is_staged) = place(prefix).native(&upload(id)).expect("an upload");
            assert_eq!((native.key.as_ref(), native.id.as_str(), is_staged), expected);
        };
        check("", "native:id", ("d/a b", "native:id", false));
        check("", "staged:0f:native:id", (".forebay/uploads/0f", "native:id", true));
        check("data/set", "staged:0f:x", ("data/set/.forebay/uploads/0f", "x", true));
        assert!(place("").native(&upload("staged:../x:y")).is_err(), "a name is no way out");
        assert_eq!(place("").spell(&Path::from("d/a b")), "b/d%2Fa%20b");
        assert_eq!(place("").endpoint, ENDPOINT);
    }
}
