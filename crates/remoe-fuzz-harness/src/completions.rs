//! Target: bodies of `/v1/completions`.

use crate::bodies;

pub fn run(body: &[u8]) {
    bodies::run(false, body);
}

pub fn seeds() -> Vec<Vec<u8>> {
    bodies::seeds(&[
        r#""prompt":"once upon""#,
        r#""prompt":["a","é 😀"]"#,
        r#""prompt":[1,2,459]"#,
        r#""prompt":[[3,4],[5],"x"]"#,
    ])
}
