//! The XML in which Azure lists keys.
//!
//! Format: <https://learn.microsoft.com/rest/api/storageservices/list-blobs>. A name that XML cannot hold comes
//! percent-encoded, and says so. ETags come without the quotes that all other answers have around them.

use chrono::{DateTime, Utc};
use object_store::{ObjectMeta, Result};
use percent_encoding::percent_decode_str;
use quick_xml::de::from_str;
use serde::Deserialize;

use super::super::send::generic;
use crate::object::key::{address, is_segment};
use crate::object::request::{ListRequest, Page};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct EnumerationResults {
    #[serde(default)]
    blobs: Blobs,
    #[serde(default)]
    next_marker: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
struct Blobs {
    #[serde(rename = "$value", default)]
    entries: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
enum Entry {
    Blob(Blob),
    BlobPrefix(BlobPrefix),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Blob {
    name: Name,
    properties: Properties,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct BlobPrefix {
    name: Name,
}

#[derive(Debug, Deserialize)]
struct Name {
    #[serde(rename = "@Encoded", default)]
    is_encoded: bool,
    #[serde(rename = "$text", default)]
    text: String,
}

#[derive(Debug, Deserialize)]
struct Properties {
    #[serde(rename = "Last-Modified")]
    last_modified: String,
    #[serde(rename = "Content-Length", default)]
    content_length: u64,
    #[serde(rename = "Etag")]
    e_tag: Option<String>,
    /// Of accounts with a hierarchical namespace, which list directories among blobs.
    #[serde(rename = "ResourceType")]
    resource_type: Option<String>,
}

impl Name {
    /// The key itself, or `None` when it is not UTF-8.
    fn decode(self) -> Option<String> {
        match self.is_encoded {
            false => Some(self.text),
            true => percent_decode_str(&self.text).decode_utf8().ok().map(|key| key.into_owned()),
        }
    }
}

/// Reads the page that was asked for.
pub(super) fn read(body: &[u8], list: &ListRequest) -> Result<Page> {
    let text = std::str::from_utf8(body).map_err(generic)?;
    let unreadable = |error| generic(format!("the store sent XML that cannot be read: {error}"));
    let answer: EnumerationResults = from_str(text.trim_start_matches('\u{feff}')).map_err(unreadable)?;
    let mut page = Page { next: answer.next_marker.filter(|marker| !marker.is_empty()), ..Page::default() };
    for entry in answer.blobs.entries {
        match entry {
            Entry::BlobPrefix(BlobPrefix { name }) => {
                let key = name.decode();
                let name = key.as_deref().and_then(|key| key.strip_prefix(&list.prefix)?.strip_suffix('/'));
                match name.filter(|name| is_segment(name)) {
                    Some(name) => page.directories.push(name.to_owned()),
                    None => page.skipped.note(key),
                }
            }
            Entry::Blob(Blob { properties, .. })
                if properties.resource_type.as_deref() == Some("directory") => {}
            Entry::Blob(Blob { name, properties }) => match name.decode() {
                Some(key) if Some(&key) == list.after.as_ref() => {}
                key => take(&mut page, key, properties)?,
            },
        }
    }
    Ok(page)
}

fn take(page: &mut Page, key: Option<String>, properties: Properties) -> Result<()> {
    let Some(location) = key.as_deref().and_then(address) else {
        // The marker of a directory stands for the directory, which its listing shows already.
        if key.as_deref().is_none_or(|key| key.trim_end_matches('/').len() + 1 != key.len()) {
            page.skipped.note(key);
        }
        return Ok(());
    };
    let last_modified = DateTime::parse_from_rfc2822(&properties.last_modified).map_err(generic)?;
    let quoted = |tag: String| if tag.ends_with('"') { tag } else { format!("\"{tag}\"") };
    page.objects.push(ObjectMeta {
        location,
        last_modified: last_modified.with_timezone(&Utc),
        size: properties.content_length,
        e_tag: properties.e_tag.map(quoted),
        version: None,
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(name: &str, more: &str) -> String {
        let modified = "<Last-Modified>Wed, 01 May 2024 10:00:00 GMT</Last-Modified>";
        let properties = format!("{modified}<Etag>0x8D</Etag><Content-Length>7</Content-Length>{more}");
        format!("<Blob>{name}<Properties>{properties}</Properties></Blob>")
    }

    #[test]
    fn a_page_keeps_what_has_an_address_and_counts_the_rest() {
        let name = |name: &str| format!("<Name>{name}</Name>");
        let entries = [
            blob(&name("d/"), ""),
            blob(&name("d/ a &amp; b"), ""),
            format!("<BlobPrefix>{}</BlobPrefix>", name("d/sub dir/")),
            blob(&name("d/.."), ""),
            blob("<Name Encoded=\"true\">d/%EF%BF%BE%2B</Name>", ""),
            blob("<Name Encoded=\"true\">d/%FF</Name>", ""),
            format!("<BlobPrefix>{}</BlobPrefix>", name("d//")),
            blob(&name("d/directory"), "<ResourceType>directory</ResourceType>"),
            blob(&name("d/plain"), "<ResourceType>file</ResourceType>"),
        ];
        let head =
            "\u{feff}<?xml version=\"1.0\" encoding=\"utf-8\"?><EnumerationResults><Prefix>d/</Prefix>";
        let text = format!(
            "{head}<Blobs>{}</Blobs><NextMarker>more</NextMarker></EnumerationResults>",
            entries.concat()
        );
        let list = ListRequest { prefix: "d/".into(), delimited: true, ..ListRequest::default() };
        let page = read(text.as_bytes(), &list).expect("page");
        let keys: Vec<_> = page.objects.iter().map(|meta| meta.location.as_ref()).collect();
        assert_eq!(keys, ["d/ a & b", "d/\u{fffe}+", "d/plain"]);
        let first = &page.objects[0];
        assert_eq!((first.e_tag.as_deref(), first.size), (Some("\"0x8D\""), 7));
        assert_eq!(first.last_modified.to_rfc3339(), "2024-05-01T10:00:00+00:00");
        assert_eq!(page.directories, ["sub dir"]);
        assert_eq!((page.skipped.keys, page.next.as_deref()), (3, Some("more")));
        let after = ListRequest { after: Some("d/ a & b".into()), ..list };
        assert_eq!(
            read(text.as_bytes(), &after).expect("page").objects.len(),
            2,
            "without the one it begins after"
        );
        let empty = format!("{head}<Blobs /><NextMarker /></EnumerationResults>");
        let page = read(empty.as_bytes(), &after).expect("an empty page");
        assert!(page.objects.is_empty() && page.next.is_none());
    }
}
