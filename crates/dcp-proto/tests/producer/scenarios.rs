//! Rows that are scenarios, played from their files.

use crate::script::rows;

rows!(out_of_order, "oso.json": os_01 os_02 os_03 os_06 os_07 os_08 os_10 os_11 os_12 os_13 os_14 os_15 os_17);
