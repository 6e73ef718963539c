//! Formats of values: a frame's text, alone and among valid ones, and the words that it describes.

use crate::input::Input;
use vmtrace::stream::{RawValues, Shown, show_values};

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (of, count) = (input.byte(), input.below(300));
    let words: Vec<u64> = (0..count.min(16)).map(|_| input.word()).collect();
    let words: Vec<u64> =
        words.iter().copied().cycle().take(if words.is_empty() { 0 } else { count }).collect();
    let text = input.take(usize::MAX);
    let braces = [br#"{"values":[{"name":"a","#.as_slice(), text, b"}]}"].concat();
    for text in [text, &braces] {
        let raw = RawValues { function: 1, tracer: 2, of: of % 3, text };
        match raw.format() {
            Err(reason) => assert!(!reason.is_empty()),
            Ok(None) => assert_eq!(of % 3, 2),
            Ok(Some(format)) => {
                let shown: Vec<_> = show_values(&format.values, 0, &words).collect();
                assert_eq!(shown.len(), format.values.len());
                let needed = format.words();
                for (name, value) in shown {
                    match value {
                        Some(Shown::Text(text)) => {
                            assert!(text.len() <= 2000 && !text.contains(&0));
                        }
                        Some(Shown::Raw(raw)) => {
                            assert!(raw.len() <= 64.max(8 * words.len()), "{name}");
                        }
                        Some(Shown::Words(all)) => assert!((1..=64).contains(&all.len()), "{name}"),
                        Some(_) => assert!(!words.is_empty()),
                        None => assert!(words.len() < needed),
                    }
                }
                let failed = show_values(&format.values, u64::MAX, &words);
                assert!(failed.take(64).all(|(_, shown)| shown.is_none()));
            }
        }
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let fields = [
        r#""type":"signed","bytes":4"#,
        r#""type":"enum","bytes":1,"signed":true,"names":[[-1,"NONE"],[18446744073709551615,"X"]]"#,
        r#""type":"text","bytes":12"#,
        r#""type":"bits","shift":3,"width":9,"signed":true"#,
        r#""type":"raw","bytes":9"#,
        r#""type":"later","bytes":9"#,
        r#""type":"pointer"},{"name":"b","type":"char""#,
    ];
    let head = [&[0, 3, 0][..], &[0xff; 8], &[0x41; 8], &[0; 8]].concat();
    fields.iter().map(|field| [&head, field.as_bytes()].concat()).collect()
}
