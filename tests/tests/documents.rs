//! Documents say all that there is to say.

use forebay_tests::repository;
use forebay_volume::VolumeSettings;

/// The names of all settings, those of nested tables included.
fn names(table: &toml::Table) -> Vec<String> {
    let nested = table.values().filter_map(toml::Value::as_table).flat_map(names);
    table.keys().cloned().chain(nested).collect()
}

#[test]
fn every_setting_is_in_the_configuration_document() {
    let root = repository();
    let document = std::fs::read_to_string(root.join("docs/configuration.md")).expect("the document");
    let mut settings = VolumeSettings::default();
    // What has no default is left out of a table.
    settings.cache.directory = Some("/".into());
    settings.cache.pin_bytes = Some(0);
    settings.cache.peers.secret = Some("/".into());
    settings.cache.peers.listen = Some(String::new());
    let table = toml::Table::try_from(settings).expect("settings are a table");
    let missing: Vec<String> = names(&table)
        .into_iter()
        .filter(|name| !document.contains(&format!("`{name}`")) && !document.contains(&format!(".{name}]")))
        .collect();
    assert!(missing.is_empty(), "not in docs/configuration.md: {missing:?}");
}
