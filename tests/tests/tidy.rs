//! The repository keeps its own rules, and each rule catches what breaks it.

use forebay_tests::repository;
use forebay_tests::tidy::{CHECKS, Repo};

#[test]
fn the_repository_is_tidy() {
    let root = repository();
    let repo = Repo::read(&root).expect("the checkout can be read");
    let findings: Vec<String> = CHECKS
        .iter()
        .flat_map(|check| (check.find)(&repo).into_iter().map(|found| format!("{}: {found}", check.name)))
        .collect();
    assert!(findings.is_empty(), "{} findings:\n{}", findings.len(), findings.join("\n"));
}

#[test]
fn every_check_catches_its_bad_samples_and_passes_the_good_one() {
    for check in CHECKS {
        for sample in check.bad {
            let findings = (check.find)(&Repo::of(sample));
            assert!(!findings.is_empty(), "{}: nothing found in {sample:?}", check.name);
        }
        let findings = (check.find)(&Repo::of(check.good));
        assert!(findings.is_empty(), "{}: found {findings:?}", check.name);
    }
}
