#![no_main]
remoe_fuzz::target!(wire);
