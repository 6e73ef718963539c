//! Converts streams of arbitrary bytes to every format of `vmtrace convert`.

use std::path::Path;

use clap::ValueEnum as _;
use vmtrace::convert::{Format, Tally};
use vmtrace::export::Player;

use crate::stream_reader::sealed;

pub(crate) fn run(input: &[u8]) {
    let stream = sealed(input);
    let folder = tempfile::tempdir().expect("a directory");
    for &format in Format::value_variants() {
        let place = folder.path().join("out");
        let output = format.output(&place).expect("a place");
        let writer = format.writer(&output).expect("a file");
        let mut player = Player::new(Tally::new(writer, format));
        let refused = player.push(&stream).is_err();
        let torn = player.finish().is_err();
        let tally = player.into_export();
        let begun = tally.has_begun();
        assert!(tally.told().all(|line| !line.contains('\n')));
        drop(tally);
        output.commit().expect("moved");
        assert!(begun || refused || torn);
        check(format, &place, begun);
    }
}

/// Text from the guest must stay inside its quotes.
fn check(format: Format, place: &Path, begun: bool) {
    if format == Format::Chrome && begun {
        let text = std::fs::read_to_string(place).expect("UTF-8");
        // Damage ends what could still be told of, and the file is as long as that is.
        if text.ends_with("]}\n") {
            let trace: serde_json::Value = serde_json::from_str(&text).expect("JSON");
            assert!(trace["traceEvents"].is_array());
        }
    }
    if format == Format::Html && begun {
        // Its data and its script, when damage did not end it before.
        let page = std::fs::read_to_string(place).expect("UTF-8");
        assert!(page.is_empty() || page.matches("<script").count() == 2);
    }
    if place.is_dir() {
        std::fs::remove_dir_all(place).expect("ours");
    } else {
        std::fs::remove_file(place).expect("ours");
    }
}
