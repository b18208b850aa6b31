// The start of the page: shows what its address names.

import { showJob } from "./job.js";
import { showOverview } from "./overview.js";
import { showHeader } from "./page.js";
import { showPool } from "./pool.js";
import { followAirflowLinks, here } from "./urls.js";

const main = document.getElementById("main");
followAirflowLinks();
showHeader(here.job || here.pool || "Elastic Deep Learning");
if (here.job) showJob(main, here.job);
else if (here.pool) showPool(main, here.pool);
else showOverview(main);
