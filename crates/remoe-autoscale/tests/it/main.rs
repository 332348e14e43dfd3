//! Tests of scaling, in one program.

mod load;
