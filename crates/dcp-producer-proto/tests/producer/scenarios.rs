//! Rows that are scenarios, played from their files.

use crate::script::rows;

rows!(out_of_order, "oso.json":
    os_01 os_02 os_03 os_06 os_07 os_08 os_10 os_11 os_12 os_13 os_14 os_15 os_17);

rows!(snapshots, "snapshots.json":
    ss_01 ss_02 ss_03 ss_04 ss_05 ss_06 ss_07 ss_08 ss_09 ss_10 ss_11 ss_12 ss_13 ss_14 ss_15 ss_16
    ss_18 ss_19 ss_20 ss_21 ss_22 ss_23 ss_24 ss_25 ss_26 ss_27 co_19 co_21 co_22 co_23);

rows!(stream_ends, "stream_end.json":
    se_02 se_03 se_04 se_05 se_06 se_07 se_08 se_10 se_11 se_14 se_15 se_16 se_17 se_18 se_20 se_21
    se_22 se_25 se_27 se_28 se_36 se_37 se_38 se_39);

rows!(takeovers, "takeover.json": fc_25);

rows!(requests, "requests.json":
    sr_20 sr_55 sr_56 sr_58 sr_59 op_10 co_63 op_20 fc_17 fc_18 fc_23 fc_24 fc_30 fc_31 fc_32 fc_33 fc_40
    ct_28 cm_29);

// Our own: what lies next to the rows of the tables.
rows!(neighbours, "neighbours.json":
    near_01 near_02 near_03 near_04 near_05 near_06 near_07 near_08 near_09 near_10 near_11 near_12
    near_13 near_14 near_15 near_16 near_17 near_18 near_19 near_20 near_21 near_22 near_23 near_24
    near_25 near_26 near_27 near_28 near_29 near_30 near_31 near_32 near_33 near_34);
