//! A test helper: checks that docs/stream.md describes all keys of the JSON output.

use serde_json::Value;

/// Fails at the first key that the document does not have.
pub(super) fn check(json: &Value) {
    let docs = include_str!("../../../docs/stream.md");
    let mut all = vec![json];
    while let Some(value) = all.pop() {
        match value {
            Value::Object(object) => {
                for (key, value) in object {
                    assert!(docs.contains(&format!("`{key}`")), "{key} is not documented");
                    all.push(value);
                }
            }
            Value::Array(list) => all.extend(list),
            _ => {}
        }
    }
}
